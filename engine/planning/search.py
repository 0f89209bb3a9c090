"""The search over plans: which strategies and settings fit on a device, the fastest first, and why the others do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.config.masked import plain_value
from engine.planning.candidates import RECOMPUTE, Candidate, Layout, micro_batches, written
from engine.planning.plan import Plan
from engine.planning.plan_text import as_text, show_search
from engine.planning.plan_text import size as written_size
from engine.utils.tree import batch_size, map_tensors

VERDICTS = ("fits", "too large", "slower", "refused", "failed", "not planned")


@dataclass(frozen=True)
class Tried:
    """A candidate of a search, with the verdict on it."""

    candidate: Candidate
    verdict: str
    """One of :data:`VERDICTS`. ``"slower"``: not planned, because a candidate that fits does the same with less work; ``"refused"``: by the strategy;
    ``"failed"``: the plan ended with another error."""
    reason: str = ""
    """Why the candidate does not fit, or was not planned."""
    plan: Plan | None = None
    """The candidate's plan; ``None``: it was ruled out without a trace."""

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it needs."""
        return self.verdict == "fits"

    def as_json(self, derived: bool = False) -> dict[str, Any]:
        """Plain dicts and values; ``derived``: see :attr:`PlanSearch.derived`."""
        plan = self.plan
        return {
            **self.candidate.settings,
            "strategy": plain_value(_strategy_as_data(self.candidate.layout.strategy)),
            "precision": str(self.candidate.precision),
            "micro_batch": self.candidate.micro_batch,
            "fit": self.candidate.code(derived),
            "set": self.candidate.command(derived),
            "verdict": self.verdict,
            "reason": self.reason,
            "need_bytes": None if plan is None else plan.peak_bytes,
            "step_s": None if plan is None else plan.step_seconds,
            "samples_per_second": None if plan is None else plan.samples_per_second,
            "tokens_per_second": None if plan is None else plan.tokens_per_second,
            "computed": [] if plan is None else list(plan.computed),
            "missing": [] if plan is None else list(plan.missing),
        }


@dataclass(frozen=True)
class PlanSearch:
    """Result of a search over plans. ``print(found)`` shows it as a table."""

    tried: tuple[Tried, ...]
    """All candidates: first those that fit, by step time; then the others by verdict, those that need the least memory first."""
    world_size: int
    device: str
    memory_bytes: int
    """Memory that a rank may use (bytes)."""
    global_batch: int
    """Samples of a step, over all ranks; the same for every candidate."""
    seconds: float
    """Duration of the search."""
    notes: tuple[str, ...] = ()
    """Assumptions of the search, and what it left out; a sentence each."""
    derived: bool = False
    """Whether the user gave ``global_batch_size``, from which a run derives ``accumulate_grad_batches`` itself."""

    @cached_property
    def fitting(self) -> tuple[Tried, ...]:
        """Candidates that fit, the fastest first."""
        return tuple(tried for tried in self.tried if tried.fits)

    @property
    def best(self) -> Tried | None:
        """The fastest candidate that fits; ``None``: nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def planned(self) -> int:
        """Number of candidates that were planned."""
        return sum(tried.plan is not None for tried in self.tried)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists; ``candidates`` in the order of :attr:`tried`."""
        return {
            "version": 1,
            "world_size": self.world_size,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "global_batch": self.global_batch,
            "seconds": self.seconds,
            "planned": self.planned,
            "candidates": [tried.as_json(self.derived) for tried in self.tried],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return as_text(self.as_json(), show_search)


def _strategy_as_data(strategy: object) -> Any:
    """A strategy as text or a mapping; an object becomes the text that one types in a script."""
    return strategy if isinstance(strategy, (str, Mapping)) else written(strategy)


Planner = Callable[[Candidate], Plan]
"""Plans a candidate. Raises the errors of its strategy."""
_PARAMETER_BYTES = {"64-true": 8, "bf16-true": 2, "16-true": 2}
"""Bytes of one parameter, by precision; 4 under all others."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The candidates that a search goes through."""

    layouts: Sequence[Layout]
    precisions: Sequence[Any]
    recompute: Sequence[str | int | None] = RECOMPUTE
    """Settings of ``activation_checkpointing``, from the most memory to the least."""
    global_batch: int
    """Samples of a step over all ranks, which no candidate changes."""
    micro_batch: int
    """Samples of the given micro-batch."""
    largest: int | None = None
    """Samples of the largest micro-batch to try; ``None``: no limit."""
    first: bool = False
    """Whether to end with the first candidate that fits."""
    derived: bool = False
    """Whether ``global_batch_size`` was given: then a run finds the window by itself."""
    notes: Sequence[str] = ()
    """Sentences on what was given, and so is not varied."""


def search(
    space: Space,
    plan_of: Planner,
    *,
    world_size: int,
    device: str,
    memory_bytes: int,
    seconds: float | None = None,
    report: Callable[[Tried], None] = lambda tried: None,
) -> PlanSearch:
    """Plan what can be the fastest, and rule the rest out by what is known without a trace::

        for each strategy and precision, unless parameters, gradients and optimizer state alone are too large:
            for recomputation in none, selective, full:
                the given micro-batch, then larger ones until one does not fit; if it does not fit, smaller ones until one does
                (sizes that fit with less recomputation are not planned: recomputing only costs time)

    Args:
        space: what to go through.
        plan_of: plans one candidate.
        world_size, device, memory_bytes: as in :class:`PlanSearch`.
        seconds: begin no further plan after this time; ``None``: no limit.
        report: called with each candidate as soon as its verdict is known.
    """
    started = time.monotonic()
    walk = _SearchWalk(space, plan_of, memory_bytes, None if seconds is None else started + seconds, report)
    for layout in space.layouts:
        for precision in space.precisions:
            if not (space.first and any(tried.fits for tried in walk.tried)):
                walk.layout(layout, precision)
    walk.closest()
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}

    def rank(tried: Tried) -> tuple[int, float]:
        if tried.plan is None:
            return order[tried.verdict], float("inf")
        return order[tried.verdict], tried.plan.step_seconds if tried.fits else tried.plan.peak_bytes

    notes = [
        *space.notes,
        f"every candidate trains {space.global_batch} samples in a step, over all ranks",
        "a micro-batch that fits rules smaller ones out, and the same with more recomputation: they take longer",
    ]
    if walk.late:
        notes.append(f"the time limit of {seconds:g} s ended the search: what is marked as not planned may be better")
    return PlanSearch(
        tuple(sorted(walk.tried, key=rank)),
        world_size,
        device,
        memory_bytes,
        space.global_batch,
        time.monotonic() - started,
        tuple(notes),
        space.derived,
    )


class _SearchWalk:
    """Goes through the candidates of a space, and remembers which results rule out candidates that were not tried."""

    def __init__(
        self, space: Space, plan_of: Planner, memory: int, deadline: float | None, report: Callable[[Tried], None]
    ) -> None:
        self._space, self._plan_of, self._memory, self._deadline, self._report = (
            space,
            plan_of,
            memory,
            deadline,
            report,
        )
        self.tried: list[Tried] = []
        self.late = False
        self._model: tuple[int, int] | None = None  # numbers of parameters and of trainable ones
        self._optimizer: dict[str, float] = {}  # bytes of its state for each byte of parameters, by precision
        self._ruled_out: list[tuple[int, Candidate]] = []  # each with the least number of bytes that it needs
        self._refused: list[tuple[Layout, str, str]] = []  # with verdict and reason
        self._needs: dict[
            tuple[Any, ...], dict[int, int]
        ] = {}  # bytes by micro-batch, of candidates that differ in nothing else

    def layout(self, layout: Layout, precision: object) -> None:
        """Try all candidates with this layout and this precision."""
        share, remainder = divmod(self._space.global_batch, layout.data_ranks)
        sizes = [] if remainder else micro_batches(min(self._space.micro_batch, share), share)
        sizes = [size for size in sizes if self._space.largest is None or size <= self._space.largest]
        first = self._candidate(layout, precision, self._space.recompute[0], sizes[-1] if sizes else 1)
        if not sizes:
            text = f"a step of {self._space.global_batch} samples does not divide over the {layout.data_ranks} ranks that see different data"
            self._add(Tried(first, "refused", text))
        elif not layout.is_requested and (refusal := self._known_refusal(layout)) is not None:
            self._add(Tried(first, *refusal))
        elif (needed := self._too_large_without_trace(layout, precision)) is not None:
            text = f"parameters, gradients and optimizer state alone need {written_size(needed)} of {written_size(self._memory)}"
            self._add(Tried(first, "too large", text))
            self._ruled_out.append((needed, self._candidate(layout, precision, self._space.recompute[-1], sizes[0])))
        else:
            self._recomputations(layout, precision, sizes)

    def closest(self) -> None:
        """If nothing fits, also plan the smallest candidate that was ruled out without a plan, unless a planned one needs less than it can."""
        needed = min((tried.plan.peak_bytes for tried in self.tried if tried.plan), default=None)
        if needed is None or any(tried.fits for tried in self.tried) or not self._ruled_out:
            return
        bound, candidate = min(self._ruled_out, key=lambda entry: entry[0])
        if bound < needed:
            self._try(candidate)

    def _recomputations(self, layout: Layout, precision: object, sizes: list[int]) -> None:
        """Try the micro-batches in ``sizes`` with each setting of recomputation, from the least recomputation to the most."""
        best = 0
        for number, recompute in enumerate(self._space.recompute):
            if best and self._space.first:
                return
            candidates = {size: self._candidate(layout, precision, recompute, size) for size in sizes}
            for size in [size for size in sizes if size <= best]:
                self._add(Tried(candidates[size], "slower", f"micro-batches of {best} fit with less recomputation"))
            refused = False
            for size in self._sizes([size for size in sizes if size > best], sizes):
                tried = self._try(candidates[size])
                refused = tried.verdict in ("refused", "failed")
                if refused:
                    break
                if tried.fits:
                    best = max(best, size)
            if refused and not number:
                return  # the strategy itself, whatever is recomputed
            self._explain_untried(candidates, best)

    def _sizes(self, open_sizes: list[int], sizes: list[int]) -> Iterator[int]:
        """Yield the micro-batches of ``open_sizes`` to try, which depends on earlier results: up from the given one while they fit, else down until
        one fits."""
        start = max([size for size in sizes if size <= self._space.micro_batch], default=sizes[0])
        ascending = [size for size in open_sizes if size >= start]
        for size in ascending:
            yield size
            if self._space.first and self.tried[-1].fits:
                return
            if not self.tried[-1].fits:
                if size == ascending[0]:
                    yield from self._smaller_sizes([smaller for smaller in open_sizes if smaller < size][::-1])
                # Between micro-batches sharded strategies keep whole gradients: a step of one may fit where smaller ones do not.
                if size != sizes[-1] and not self.tried[-1].fits and self._one_window(sizes[-1]):
                    yield sizes[-1]
                return
        if not ascending:
            yield from self._smaller_sizes(open_sizes[::-1])

    def _smaller_sizes(self, sizes: list[int]) -> Iterator[int]:
        """Yield ``sizes``, which descend, until one fits."""
        for size in sizes:
            yield size
            if self.tried[-1].fits:
                return

    def _one_window(self, size: int) -> bool:
        """Check whether a micro-batch of ``size`` makes up a whole step, under a strategy that shards parameters."""
        latest = self.tried[-1].candidate
        return latest.layout.shards > 1 and latest.micro_batch * latest.window == size

    def _explain_untried(self, candidates: dict[int, Candidate], best: int) -> None:
        """Add a verdict with its reason for each of ``candidates`` that was not tried. ``best``: the largest micro-batch that fits, 0 if none
        does."""
        ids = {id(candidate) for candidate in candidates.values()}
        attempts = [attempt for attempt in self.tried if id(attempt.candidate) in ids]
        failed = [attempt for attempt in attempts if attempt.verdict == "too large"]
        seen = {attempt.candidate.micro_batch for attempt in attempts}
        for size, candidate in candidates.items():
            if size in seen:
                continue
            if size < best:
                self._add(Tried(candidate, "slower", f"micro-batches of {best} fit"))
            elif failed:
                smallest = min(failed, key=lambda attempt: attempt.candidate.micro_batch)
                self._add(
                    Tried(
                        candidate,
                        "too large",
                        f"micro-batches of {smallest.candidate.micro_batch} are too large already",
                    )
                )

    def _candidate(self, layout: Layout, precision: object, recompute: str | int | None, size: int) -> Candidate:
        window = max(1, self._space.global_batch // layout.data_ranks // size)
        return Candidate(layout, precision, recompute, size, window)

    def _try(self, candidate: Candidate) -> Tried:
        """Plan a candidate, unless it is known to be too large or the time is over, and add the verdict."""
        if (bound := self._why_too_large(candidate)) is not None:
            return self._add(Tried(candidate, "too large", bound))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.late = True
            return self._add(Tried(candidate, "not planned", "the time limit was over"))
        try:
            plan = self._plan_of(candidate)
        except Exception as error:
            # Strategies refuse with a ValueError; anything else may be the plan's own fault, and is shown too.
            verdict = "refused" if isinstance(error, ValueError) else "failed"
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._refused.append((candidate.layout, verdict, text))
            return self._add(Tried(candidate, verdict, text))
        self._remember(candidate, plan)
        if plan.fits:
            return self._add(Tried(candidate, "fits", "", plan))
        peak = plan.worst.peak
        module_text = f", in {peak.module}" if peak.module else ""
        reason = (
            f"peak {written_size(plan.peak_bytes)} of {written_size(self._memory)} in phase {peak.phase!r}{module_text}"
        )
        return self._add(Tried(candidate, "too large", reason, plan))

    def _add(self, tried: Tried) -> Tried:
        self.tried.append(tried)
        self._report(tried)
        return tried

    # -- what rules out without a trace -----------------------------------------------------------------------------------------

    def _remember(self, candidate: Candidate, plan: Plan) -> None:
        """Store from the plan of a candidate what bounds the memory of others."""
        self._model = plan.job.parameters, plan.job.trainable
        end = [trace.timeline[-1].memory for trace in plan.traces if trace.timeline]
        ratios = [memory.optimizer_state / memory.parameters for memory in end if memory.parameters]
        if (
            ratios
            and candidate.layout.bounded
            and not candidate.layout.offloaded
            and candidate.layout.sharded_parameters
        ):
            self._optimizer.setdefault(str(candidate.precision), min(ratios))
        self._needs.setdefault(_comparison_key(candidate), {})[candidate.micro_batch] = plan.peak_bytes

    def _known_refusal(self, layout: Layout) -> tuple[str, str] | None:
        """The verdict and the reason for a layout whose tensor or pipeline degree is a multiple of one that was refused: what cannot be divided by 2
        cannot be divided by 4. ``None``: no such layout was refused."""
        for refused, verdict, text in self._refused:
            for axis, other_axis in (("tp", "pp"), ("pp", "tp")):
                degree = refused.degree(axis)
                if degree > 1 and refused.degree(other_axis) == 1 and layout.degree(axis) % degree == 0:
                    return verdict, f"as with {axis}={degree}: {text}"
        return None

    def _too_large_without_trace(self, layout: Layout, precision: object) -> int | None:
        """The bytes of parameters, gradients and optimizer state, which every step holds at its end, if they alone exceed the memory; ``None``: they
        fit, or are not known."""
        if self._model is None or layout.is_requested or layout.offloaded or not layout.bounded:
            return None
        parameters, trainable = self._model
        element_bytes = _PARAMETER_BYTES.get(str(precision), 4)
        state = self._optimizer.get(str(precision), 0.0) * parameters * element_bytes / layout.shards
        weights = parameters * element_bytes
        if layout.sharded_parameters:
            needed = state + (weights + trainable * element_bytes) / layout.shards
        else:
            needed = state + weights
        return None if needed <= self._memory else int(needed)

    def _why_too_large(self, candidate: Candidate) -> str | None:
        """The reason, with a lower bound of the memory, if a candidate is certain to be too large; ``None``: it may fit.

        As a function of the micro-batch, memory is the maximum of several straight lines: outside the interval between two planned sizes, it is
        not below the line through them.
        """
        points = sorted(self._needs.get(_comparison_key(candidate), {}).items())
        size = candidate.micro_batch
        pairs = [pair for pair in pairwise(points) if not pair[0][0] < size < pair[1][0]]
        for (low, bytes_low), (high, bytes_high) in pairs:
            bound = bytes_low + (bytes_high - bytes_low) * (size - low) // (high - low)
            if bound > self._memory:
                return f"at least {written_size(bound)} of {written_size(self._memory)}, as micro-batches of {low} and {high} show"
        return None


def _comparison_key(candidate: Candidate) -> tuple[Any, ...]:
    """A key that candidates share if their memory differs by the size of the micro-batch alone."""
    single = candidate.window == 1  # further micro-batches run beside the gradients of the earlier ones
    return str(candidate.layout), str(candidate.precision), candidate.activation_checkpointing, single


def resized(batch: Any, current: int, target: int) -> Any:
    """Return ``batch``, which has ``current`` samples, with ``target`` samples: the first ones, repeated from the start if there are too few.

    Raises:
        ValueError: the samples of the batch cannot be told apart.
    """
    if target == current:
        return batch
    rows = torch.arange(target) % current
    changed = map_tensors(partial(_rows, current=current, rows=rows), _lists(batch, current, rows.tolist()))
    if batch_size(changed) != target:
        raise ValueError(
            f"the batch ({type(batch).__name__}) of {current} samples cannot be resized to {target}: its samples cannot be told apart"
        )
    return changed


def _rows(tensor: Tensor, *, current: int, rows: Tensor) -> Tensor:
    """The ``rows`` of a tensor that has one row for each of the ``current`` samples; any other tensor is unchanged."""
    return tensor[rows] if tensor.ndim and tensor.shape[0] == current else tensor


def _lists(tree: Any, current: int, rows: Sequence[int]) -> Any:
    """Return ``tree`` with the ``rows`` of each list that has one item for each of the ``current`` samples, such as texts, inside dicts and lists."""
    if type(tree) is dict:
        return {key: _lists(item, current, rows) for key, item in tree.items()}
    if type(tree) is list and len(tree) == current and not any(isinstance(item, Tensor) for item in tree):
        return [tree[row] for row in rows]
    return tree
