"""Repeats one step of an earlier training: chooses where to start, at a checkpoint or at the seed, observes the step by a callback, and has its
result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.callback import Callback
from engine.checkpoint.catalog import find_in, folder_at
from engine.checkpoint.runs import FIRST, run_root_of
from engine.distributed.collectives import gather_json
from engine.loop.run import Run
from engine.module import TrainModule
from engine.step.gradients import Loss, loss_in, nonzero
from engine.utils.paths import expanded
from engine.utils.text import terminal_text
from engine.utils.tree import full_tensor, leaves

MOST_EARLIER = 10_000
"""The number of steps before the replayed one whose values are kept."""


_COUNTS = ("skipped_steps", "epoch")
"""Names of values that say nothing about weights."""
_MOST_NAMES = 5


@dataclass(slots=True)
class ReplayedStep:
    """The observations in one optimizer step that was repeated from an earlier checkpoint. ``str()`` gives them as text."""

    step: int
    """The number of the step, from 1: the number of optimizer steps done once it is complete."""
    epoch: int
    checkpoint: str
    """The checkpoint that the replay started from; empty: it started at the start of the training."""
    ranks: int
    """The number of processes of the replay."""
    recorded_ranks: int
    """The number of processes of the original run; that of the replay, if the run has no checkpoint that says it."""
    samples: list[int] | list[str] | None = None
    """The step's samples in order, as indices in the dataset; of ready batches the batches' indices, of a mixture texts such as ``"web[183]"``.
    ``None``: they are not known."""
    data: str = "a stream"
    """A name of the kind of data, for texts, if its samples are not known."""
    losses: list[list[float]] = field(default_factory=list)
    """By rank, the loss of each micro-batch, in manual optimization of each backward pass in the step's batch; sum / count for an
    :class:`engine.Loss`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Values that the step logged, over all ranks."""
    grad_norm: float | None = None
    """The 2-norm of the gradients before clipping; ``None`` if the strategy does not show gradients."""
    grad_norms: dict[str, float] = field(default_factory=dict)
    """The 2-norm of each parameter's gradient before clipping."""
    recorded: dict[str, float] | None = None
    """The values that the original run logged at this step, to compare with :attr:`metrics`; ``None``: they were not looked up."""
    earlier: dict[int, dict[str, float]] = field(default_factory=dict, repr=False)
    """Values that the replay logged in steps before this one, at most the first :data:`MOST_EARLIER`, by step."""
    equal: dict[str, int] = field(default_factory=dict)
    """By name, how many finite values of this step and earlier ones :meth:`compare` has found to be the run's, to the last bit."""
    difference: str = ""
    """The first value that is another one than in the run, as text; empty: :meth:`compare` found none."""
    nonfinite: str | None = None
    """The first place, in the order of the computation, where a number was not finite; ``None``: all were finite."""

    def __str__(self) -> str:
        return self.text(per_layer=False)

    def text(self, per_layer: bool) -> str:
        """The step as text, in several lines. ``per_layer``: include the norm of each parameter's gradient."""
        now_on = "" if self.ranks == self.recorded_ranks else f", now on {self.ranks}"
        ranks = f"{self.recorded_ranks} rank(s){now_on}"
        lines = [f"step {self.step} (epoch {self.epoch}) from {self.checkpoint or 'the start'}, {ranks}"]
        samples = f"{self.data}: not known" if self.samples is None else ", ".join(map(str, self.samples))
        lines.append(f"samples: {samples}")
        for rank, losses in enumerate(self.losses):
            lines += [f"rank {rank}, micro-batch {index}: loss {loss!r}" for index, loss in enumerate(losses)]
        lines += [f"logged: {name} = {value!r}{self._compared(name, value)}" for name, value in self.metrics.items()]
        if self.recorded is not None:
            lines.append(self._verdict())
        lines.append(f"gradient norm: {'not known' if self.grad_norm is None else repr(self.grad_norm)}")
        if per_layer:
            width = max(map(len, self.grad_norms), default=0)
            lines += [f"  {name.ljust(width)}  {norm:.6g}" for name, norm in self.grad_norms.items()]
        lines.append(f"first number that is not finite: {self.nonfinite or 'none'}")
        return "\n".join(terminal_text(line, one_line=True) for line in lines)

    def compare(self, recorded: Mapping[int, Mapping[str, float]]) -> None:
        """Compare the values that the replay logged with those that the run has ``recorded``, by step and name; up to the first difference.

        A number that is not finite says nothing: it is the same from other weights. On another number of ranks only the step itself is compared.
        """
        of_step = recorded.get(self.step, {})
        self.recorded = {name: of_step[name] for name in self.metrics if name in of_step}
        if self.ranks != self.recorded_ranks:
            return
        for step, metrics in sorted([*self.earlier.items(), (self.step, self.metrics)]):
            for name in metrics.keys() & recorded.get(step, {}).keys():
                value, before = metrics[name], recorded[step][name]
                if not _are_equal(value, before):
                    self.difference = f"at step {step} {name} = {value!r}, recorded: {before!r}"
                    return
                if math.isfinite(value) and name not in _COUNTS:
                    self.equal[name] = self.equal.get(name, 0) + 1

    def _verdict(self) -> str:
        """A line that says whether the replay repeats the run, as far as the run's record tells."""
        if self.ranks != self.recorded_ranks:
            return f"not verified: the run had {self.recorded_ranks} rank(s), and on {self.ranks} rounding and dropout differ"
        if self.difference and self.checkpoint:
            return f"THIS IS NOT THE RUN'S STEP: {self.difference}. Give the code, the data and the settings of the run"
        if self.difference:
            return (
                f"THIS IS NOT THE RUN'S STEP: {self.difference}. The run began with other weights, or had other code, data or settings. If its "
                "script called seed_everything() with another number than Fit(seed=) before it made the module, call Fit.replay in that script, or "
                "train again with equal seeds, or with ModelCheckpoint(every=...), so that a replay starts at a checkpoint"
            )
        if self.equal:
            counts = ", ".join(f"{count} of {name}" for name, count in sorted(self.equal.items())[:_MOST_NAMES])
            return f"verified: the values that the run recorded up to this step are the same to the last bit ({counts})"
        start = (
            ""
            if self.checkpoint
            else ", and from the seed it is the run's step only if the module began with the same weights"
        )
        return (
            f"not verified: up to this step the run recorded no finite value that the replay logs, too{start}. Report and CSVLogger record what "
            "training_step logs; log_every_n_steps=1 records every step"
        )

    def _compared(self, name: str, value: float) -> str:
        if self.recorded is None or name not in self.recorded:
            return ""
        recorded = self.recorded[name]
        is_equal = _are_equal(value, recorded)
        if is_equal and not math.isfinite(value):
            return ", recorded: not finite either"
        return ", as recorded" if is_equal else f", recorded: {recorded!r} (differs by {abs(value - recorded):.2g})"


def _are_equal(value: float, recorded: float) -> bool:
    return value == recorded or (math.isnan(value) and math.isnan(recorded))


@dataclass(frozen=True)
class StartingPoint:
    """The place from which a run's step can be repeated, and the checkpoint that describes the run at that step."""

    checkpoint: str
    """The newest complete checkpoint before the step; empty: there is none, so the training starts again, from its seed."""
    described_by: str
    """The first checkpoint at or after the step, else the newest: saved by the processes that ran the step. If they were resumed from
    :attr:`checkpoint`, their settings and their number may differ from those there. A run without checkpoints is described by its folder."""
    manifest: dict[str, Any]
    """The manifest of :attr:`described_by`; empty for a run without checkpoints."""
    began_with: str = ""
    """The checkpoint of another run with which the run began."""

    @property
    def ranks(self) -> int:
        """The number of processes of the run; 0: not known."""
        return int(self.manifest.get("world_size", 0))

    def check_seed(self, step: int, seed: int | None) -> None:
        """Check that a replay of ``step`` with this ``seed`` starts as the run did, as far as that is known.

        Raises:
            ValueError: the replay would start again from the seed, and the run had none, or another one, or began with a checkpoint.
        """
        if self.checkpoint:
            return
        problem = f"replay(step={step}): there is no checkpoint from before this step, so the training has to start again, and"
        if self.began_with:
            raise ValueError(
                f"{problem} the run began with {self.began_with}. If it resumed from there, give run={self.began_with!r}; if it took the "
                "weights alone, load them into the module and give run=None"
            )
        values = recorded_values(self.manifest)
        recorded = values.get("seed")
        if recorded is not None and recorded != seed:
            raise ValueError(f"{problem} the run had seed={recorded}, not {seed}: give the settings that the run had")
        if seed is None or (recorded is None and "seed" in values):
            unknown = "" if "seed" in values else "give the seed that the run had, "
            raise ValueError(
                f"{problem} without a seed its start cannot be repeated: {unknown}train with Fit(seed=), or save more with ModelCheckpoint"
            )

    def check_module(self, step: int, module: TrainModule) -> None:
        """Check that ``module`` can have the weights with which a run began, where a replay of ``step`` starts again.

        Raises:
            ValueError: it was trained already.
        """
        if not self.checkpoint and module.global_step:
            raise ValueError(
                f"replay(step={step}) starts the training again, and this {type(module).__name__} was trained for {module.global_step} step(s): "
                "give a new one, with the weights that the run began with"
            )


def recorded_values(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and descriptions of objects that a manifest records, as plain values."""
    config = manifest.get("config")
    entries = config.items() if isinstance(config, dict) else ()
    return {str(name): entry["value"] for name, entry in entries if isinstance(entry, dict) and "value" in entry}


def starting_point(run: str | Path | None, step: int) -> StartingPoint:
    """Find the checkpoints for a replay of ``step``.

    Args:
        run: a run's folder, its checkpoint folder, or one of its checkpoints; a local path or a URL. ``None``: start at the seed.
        step: the number of the step, from 1.

    Raises:
        ValueError: ``step`` is not an int of at least 1.
        FileNotFoundError: there is no run, or ``run`` is a checkpoint that is not from before the step.
        DamagedCheckpoint: the run has only incomplete checkpoints.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"replay(step={step!r}): steps are numbered from 1")
    if run is None:
        return StartingPoint("", "", {})
    folder = folder_at(run)
    if folder is None:
        parent, _, name = str(run).rstrip("/").rpartition("/")
        for run_folder in (str(run), *([parent or "."] if name == FIRST else [])):
            if record := run_root_of(run_folder).record(0):
                return StartingPoint("", run_folder, {}, record.began_with)
    try:
        storage, names = find_in(run, folder)
    except FileNotFoundError as error:
        if _has_files(run):
            raise
        raise FileNotFoundError(_no_record(run, step)) from error
    manifests = storage.manifests()
    steps = {name: saved for name, manifest in manifests.items() if (saved := _saved_step(manifest)) is not None}
    earlier = [name for name, saved in steps.items() if name in names and saved < step]
    if not earlier and folder is None:
        raise FileNotFoundError(
            f"{run} is not from before step {step}: give the run's folder, to start at an earlier checkpoint or at the seed"
        )
    later = [name for name, saved in steps.items() if saved >= step]
    if not later and not earlier:
        raise FileNotFoundError(
            f"{run} has only checkpoints that do not say their step: give Fit.replay(run=None), to start at the seed"
        )
    described_by = min(later, key=steps.__getitem__) if later else max(steps, key=steps.__getitem__)
    checkpoint = str(storage.path(max(earlier, key=steps.__getitem__))) if earlier else ""
    run_folder = storage.root.rstrip("/").removesuffix("/checkpoints")
    began_with = "" if earlier else run_root_of(run_folder).record(0).began_with
    return StartingPoint(checkpoint, str(storage.path(described_by)), manifests[described_by], began_with)


def _has_files(run: str | Path) -> bool:
    """Whether something is at the path of a run that is neither a checkpoint nor a run; a URL may have something."""
    path = Path(expanded(run))
    return "://" in str(run) or path.is_file() or (path.is_dir() and any(path.iterdir()))


def _no_record(run: str | Path, step: int) -> str:
    """The message of an error: there is nothing at the path of a run."""
    return (
        f"{run} does not exist or is empty. Either the run's folder was moved, or the run has left none: without ModelCheckpoint, Report or a "
        "logger nothing is written. Such a run is repeated from its seed by the script that made it: "
        f"Fit(..., seed=<that of the run>).replay(module, loader, step={step}). Add Report() to callbacks for 'fit replay' to find the next run"
    )


def _saved_step(manifest: dict[str, Any]) -> int | None:
    """The step at which a run saved the checkpoint; ``None``: the manifest does not say."""
    counters = manifest.get("counters")
    step = counters.get("step") if isinstance(counters, dict) else None
    return step if type(step) is int else None


class LeftOut(Callback):
    """Takes the place of a callback that a replay leaves out: it accepts the callback's saved state and drops it, so that nothing warns of it."""

    def __init__(self, state_key: str) -> None:
        self._state_key = state_key

    @property
    def state_key(self) -> str:
        return self._state_key


class StepWatch(Callback):
    """Observes a replayed step and fills a :class:`ReplayedStep`, on all ranks."""

    def __init__(self, step: ReplayedStep, *, detect_anomaly: bool) -> None:
        self.step, self.detect_anomaly = step, detect_anomaly
        self.seen = False
        self._losses: list[float] = []
        self._micro_batches = 0
        self._handles: list[Any] = []
        self._outer_anomaly = False
        self._step_before_batch = self._observed_from = 0
        self._most_steps: int | None = None
        """The largest number of steps in a batch so far; ``None``: there was no batch yet. More than one in manual optimization only."""
        self._reads_gradients = False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        step, settings = self.step, run.settings
        run.warned |= {"nan", "nonfinite"}  # the answer names the first such number
        step.ranks = run.world_size
        step.recorded_ranks = step.recorded_ranks or step.ranks
        if step.ranks == step.recorded_ranks or settings.global_batch_size is not None:
            return
        if step.recorded_ranks % step.ranks:
            raise ValueError(
                f"replay on {step.ranks} ranks of a run on {step.recorded_ranks}: give a number of ranks that divides it, 1 for example"
            )
        # Fewer ranks take proportionally more micro-batches, so that the step has the same samples.
        run.loaders.window_factor = step.recorded_ranks // step.ranks

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        for reason in run.waiting_stops:  # the replay's minimum is none: they would end it before the step
            run.withdraw_stop(reason)

    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        self._step_before_batch = run.step
        if not self._may_have_step(run):
            return
        if not self.seen:
            self._begin(run, module)
        self._check(f"the batch of micro-batch {len(self._losses)}", batch)

    def _may_have_step(self, run: Run) -> bool:
        """Whether the batch that starts now can have the observed step. A batch in manual optimization may have several steps."""
        steps_before = self.step.step - 1 - run.step
        if run.module.automatic_optimization:
            return steps_before == 0
        return steps_before == 0 or (steps_before > 0 and (self._most_steps is None or steps_before < self._most_steps))

    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        if self._handles:
            value = loss.sum.detach() / nonzero(loss.count) if isinstance(loss, Loss) else loss.detach()
            number = float(full_tensor(value))
            self._check(f"the loss of micro-batch {len(self._losses)}", torch.tensor(number))
            self._losses.append(number)

    def _gradients(self, run: Run, module: nn.Module, optimizer: Any) -> None:
        """Record the norms of gradients; a hook of ``on_before_optimizer_step`` that is added in the observed step."""
        if not self._handles:
            return
        try:
            norms = run.engine.grad_norms(module, optimizer=optimizer)
        except ValueError:  # the strategy does not show gradients
            return
        for name, norm in norms.items():
            self.step.grad_norms[name] = float(norm)
            self._check(f"the gradient of {name}", norm)
        all_norms = torch.tensor(list(self.step.grad_norms.values()), dtype=torch.float64)
        self.step.grad_norm = float(torch.linalg.vector_norm(all_norms))

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._handles:
            self._count_steps(run)
            return
        self._micro_batches += 1
        if len(self._losses) < self._micro_batches and (loss := loss_in(outputs, type(module).__name__)) is not None:
            # A pipeline does not call on_before_backward.
            self.on_before_backward(run, module, loss)
        run.engine.settle()
        self._count_steps(run)
        if run.step >= self.step.step:
            self._end(run)
            # Set directly instead of run.stop(): all ranks get here at the same step, so there is nothing to agree on.
            run.control.reason = f"step {self.step.step} was replayed"
        elif run.step > self._observed_from:
            self._forget()

    def _count_steps(self, run: Run) -> None:
        """Note the number of steps in the batch that ends now.

        Raises:
            ValueError: it had the observed step, and was not observed.
        """
        steps, before = run.step - self._step_before_batch, self._step_before_batch
        if not self.seen and before < self.step.step - 1 and run.step >= self.step.step:
            raise ValueError(
                f"replay(step={self.step.step}): this step is not the first of its batch, which has more steps than those before it: "
                f"replay(step={before + 1}) observes the whole batch"
            )
        self._most_steps = max(self._most_steps or 0, steps)

    def _forget(self) -> None:
        """Discard the observations: the batch had steps, but not yet the one to observe."""
        self._unwatch()
        self.seen, self._losses, self._micro_batches, self.step.nonfinite = False, [], 0, None
        self.step.grad_norms, self.step.grad_norm = {}, None

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self.seen and step >= self.step.step and not self.step.metrics:
            self.step.metrics.update(metrics)
        elif step < self.step.step and (len(self.step.earlier) < MOST_EARLIER or step in self.step.earlier):
            self.step.earlier.setdefault(step, {}).update(metrics)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if self._handles:  # the step was skipped
            self._end(run)

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if self._handles:  # an error ended the step
            self._unwatch()

    def _begin(self, run: Run, module: nn.Module) -> None:
        """Start observing: the step begins with this micro-batch."""
        self.seen, self._observed_from = True, run.step
        step, state = self.step, run.state
        step.epoch = state.epoch
        assert run.train_loader is not None
        units = run.train_loader.units(state.position, run.loaders.stride)
        step.samples = None if units is None else run.train_loader.named(units)
        step.data = run.train_loader.without_units
        self._handles = [inner.register_forward_hook(self._hook(name)) for name, inner in module.named_modules()]
        self._outer_anomaly = torch.is_anomaly_enabled()
        # Only in the step to observe: reading gradients unscales them separately, which rounds differently than in the original run.
        if not self._reads_gradients:
            run.hooks.add("on_before_optimizer_step", f"[Callback]{self.state_key}", self._gradients)
            self._reads_gradients = True
        if self.detect_anomaly:
            torch.autograd.set_detect_anomaly(True)

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        torch.autograd.set_detect_anomaly(self._outer_anomaly)

    def _end(self, run: Run) -> None:
        """Stop observing, and exchange the losses and the first place that is not finite over the ranks."""
        self._unwatch()
        rows = gather_json(run.engine.group, [list(map(repr, self._losses)), self.step.nonfinite])
        self.step.losses = [list(map(float, losses)) for losses, _ in rows]
        several = len(rows) > 1
        places = [f"{where} (rank {rank})" if several else where for rank, (_, where) in enumerate(rows) if where]
        self.step.nonfinite = places[0] if places else None

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            where = f"the output of {name}" if name else "the model's output"
            self._check(f"{where} ({type(module).__name__}) in micro-batch {len(self._losses)}", output)

        return hook

    def _check(self, where: str, tree: Any) -> None:
        """Record ``where`` if ``tree`` is the first that has a number that is not finite."""
        if self.step.nonfinite is None:
            flags: list[bool] = []
            for tensor in leaves(tree):
                _note(flags, tensor)
            if not all(flags):
                self.step.nonfinite = where


def _note(flags: list[bool], tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        flags.append(bool(full_tensor(tensor.detach()).isfinite().all()))
