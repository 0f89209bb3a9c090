"""A search over plans of a user's run: its global batch, the micro-batches of other sizes, and the settings of each candidate."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.config.resolve import Resolved
from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.planning import candidates
from engine.planning.candidates import (
    RECOMPUTE,
    Candidate,
    Layout,
    UsersStrategy,
    has_blocks,
    layouts,
    layouts_with,
    users_strategy,
)
from engine.planning.devices import Cluster
from engine.planning.first_batch import first_batch
from engine.planning.job import JobFacts
from engine.planning.plan import Plan
from engine.planning.search import Planner, PlanSearch, Space, Tried, search
from engine.planning.tracing import Start, set_up
from engine.utils.log import logger
from engine.utils.tree import batch_size, map_tensors

_ORIGIN = "the search"
_FIXED = ("precision", "activation_checkpointing")
"""Settings that a search varies only if nobody has given them."""
_NOT_VARIED = "not varied: compilation, clipping, optimizers, sequence and loss parallel, a pipeline's schedule and number of parts"


def search_plans(
    fit: Any,
    start: Callable[[Any], Start],
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    where: Cluster,
    *,
    precisions: Sequence[Any] = (),
    largest: int | None = None,
    seconds: float | None = None,
    first: bool = False,
    report: Callable[[Tried], None] = lambda tried: None,
) -> PlanSearch:
    """Plan the ways to train ``module`` on these ranks, as :func:`engine.planning.search.search` does.

    Args:
        fit: an :class:`engine.Fit`, whose settings hold but for those that the search changes.
        start: of a ``Fit``, as for :func:`engine.planning.tracing.trace`.
        module, train_loader, datamodule: of the run.
        where: the ranks and their hardware.
        precisions: to try; by default the given one; if nobody has given one, ``bf16-mixed`` (on GPUs without it ``16-mixed``) beside ``32-true``.
        largest: no micro-batch is larger.
        seconds: begin no further plan after so many.
        first: end with the first that fits; the simplest strategies and the least recomputation come first.
        report: called with each candidate once its verdict is known.

    Raises:
        RuntimeError, ValueError, TypeError: as :meth:`engine.Fit.plan`.
    """
    data = module, datamodule, train_loader
    settings = fit.settings
    own = users_strategy(settings.strategy, fit.origins.get("strategy", "default"), where.world_size)
    alone = fit.from_resolved(_with(fit, {"strategy": "single", "accumulate_grad_batches": 1}), ())
    batch, samples, ways, blocks = _alone(start(alone), *data, where, own is not None and own.plan)
    data_ranks = where.world_size
    with _quiet():
        if own is not None:
            one = _own_layout(own, start(fit.from_resolved(_with(fit, {}), ())), *data, where)
            ways, data_ranks = layouts_with(one, own, ways), one.data_ranks
        space = _space(fit, own, ways, blocks, where, samples, data_ranks, precisions, largest, first)
        return search(
            space,
            _planner(fit, module, datamodule, batch, samples, where),
            world_size=where.world_size,
            device=where.device.name,
            memory_bytes=where.device.memory,
            seconds=seconds,
            report=report,
        )


def _space(
    fit: Any,
    own: UsersStrategy | None,
    ways: Sequence[Layout],
    blocks: bool,
    where: Cluster,
    samples: int,
    data_ranks: int,
    precisions: Sequence[Any],
    largest: int | None,
    first: bool,
) -> Space:
    """What the search goes through: what somebody has given is not varied."""
    settings = fit.settings
    fixed = [name for name in _FIXED if fit.origins.get(name, "default") != "default"]
    if "precision" in fixed and not precisions:
        precisions = [settings.precision]
    as_given = "activation_checkpointing" in fixed or not blocks
    return Space(
        layouts=ways,
        precisions=candidates.precisions(settings.precision, where.device, precisions),
        recompute=(settings.activation_checkpointing,) if as_given else RECOMPUTE,
        global_batch=settings.global_batch_size or samples * settings.accumulate_at(0) * data_ranks,
        micro_batch=samples,
        largest=largest,
        first=first,
        derived=settings.global_batch_size is not None,
        notes=[
            *(own.notes() if own else []),
            *(f"{name}={getattr(settings, name)} was given: no other is tried" for name in fixed),
            _NOT_VARIED,
        ],
    )


def _alone(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    where: Cluster,
    planned: bool,
) -> tuple[Any, int, list[Layout], bool]:
    """What one rank shows: a micro-batch, its samples, the layouts on these ranks, whether the model has blocks."""
    with set_up(start, module, train_loader, 0, 1, 1, datamodule, JobFacts()) as (run, _, _):
        assert run.train_loader is not None
        ways = layouts(run.module, where.world_size, where.ranks_per_node, not where.device.is_host, planned)
        return *first_batch(run.train_loader), ways, has_blocks(run.module)


def _own_layout(
    own: UsersStrategy,
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    where: Cluster,
) -> Layout:
    """The given strategy with its degrees on these ranks."""
    try:
        with set_up(start, module, train_loader, 0, where.world_size, where.nodes, datamodule, JobFacts()) as (
            run,
            _,
            _,
        ):
            return own.layout(run.engine, where.world_size)
    except ValueError:  # it is refused, and its plan will say why
        return own.layout(None, where.world_size)


def _planner(
    fit: Any,
    module: Any,
    datamodule: DataModule | None,
    batch: Any,
    samples: int,
    where: Cluster,
) -> Planner:
    """Plans a candidate of ``fit``; its micro-batch is made of ``batch``."""

    def plan_of(candidate: Candidate) -> Plan:
        one = fit.from_resolved(_with(fit, candidate.settings), fit.settings.callbacks)
        rows = [resized(batch, samples, candidate.micro_batch)]
        return one.plan(
            module,
            rows,
            datamodule=datamodule,
            world_size=where.world_size,
            nodes=where.nodes,
            device=where.device,
        )

    return plan_of


def resized(batch: Any, given: int, wanted: int) -> Any:
    """A batch of ``wanted`` samples: the first of its ``given`` ones, again from the first where there are too few.

    Raises:
        ValueError: its samples cannot be told apart.
    """
    if wanted == given:
        return batch
    rows = torch.arange(wanted) % given
    changed = map_tensors(partial(_rows, given=given, rows=rows), _lists(batch, given, rows.tolist()))
    if batch_size(changed) != wanted:
        raise ValueError(f"the batch ({type(batch).__name__}) of {given} samples cannot be made one of {wanted}")
    return changed


def _rows(tensor: Tensor, *, given: int, rows: Tensor) -> Tensor:
    return tensor[rows] if tensor.ndim and tensor.shape[0] == given else tensor


def _lists(tree: Any, given: int, rows: Sequence[int]) -> Any:
    """Lists with an item for each sample, such as texts, in plain containers."""
    if type(tree) is dict:
        return {key: _lists(item, given, rows) for key, item in tree.items()}
    if type(tree) is list and len(tree) == given and not any(isinstance(item, Tensor) for item in tree):
        return [tree[row] for row in rows]
    return tree


def _with(fit: Any, changes: Mapping[str, Any]) -> Resolved:
    """The settings of ``fit`` with these in their place. The window keeps the global batch, so that does not derive one; the ranks are
    those of the search."""
    changed = {**changes, "global_batch_size": None, "devices": "auto", "num_nodes": 1}
    return Resolved(replace(fit.settings, **changed), {**fit.origins, **dict.fromkeys(changed, _ORIGIN)}, fit.sections)


@contextmanager
def _quiet() -> Iterator[None]:
    """Candidates that nobody has chosen say nothing."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
