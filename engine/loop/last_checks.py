"""Checks at the end of a training, for what no step has reported, and the place of a step that has ended it by an error."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.runs import RUN
from engine.checkpoint.tensor_files import is_dtensor
from engine.distributed.collectives import gather_json
from engine.loop.optimization import Optimization
from engine.loop.run import Run
from engine.loop.state import status_of
from engine.module import TrainModule
from engine.utils.log import logger

MOST = 5
"""The maximum number of names that are shown."""


def check_trained(run: Run) -> None:
    """Refuse a training with optimizers that has reached its limit without a step of one, because every batch was left out; see
    :meth:`engine.loop.steps.AutomaticOptimization.note_without_loss`.

    In manual optimization, where the module may mean it, this is a warning.

    Raises:
        ValueError: ``training_step`` returned ``None`` for every batch.
    """
    optimization = run.optimization
    assert optimization is not None
    if run.state.step != run.first_step or not run.state.batches or status_of(run.stop_reason) != "completed":
        return
    if optimization.windows_without_loss and run.optimizers and not run.module.may_train_nothing:
        raise ValueError(without_loss(run.module, optimization))
    if not run.module.automatic_optimization and run.optimizers and run.is_main_process:
        logger.warning(
            "%s.training_step, with automatic_optimization=False, has not called step() of any optimizer: nothing was trained",
            type(run.module).__name__,
        )


def report_batches_told(run: Run) -> None:
    """Warn if ``max_steps`` has ended the training at another batch than :attr:`engine.Run.total_steps` told: schedules are not at their end."""
    batches, state, max_steps = run.batches_told, run.state, run.max_steps
    if batches is None or max_steps is None or state.step < max_steps or state.batches == batches:
        return
    if not run.is_main_process:
        return
    name = type(run.module).__name__
    logger.warning(
        "max_steps=%d ended the training after %d batches, and run.total_steps had said %d, so a schedule of that length is not at its end: set "
        "%s.steps_per_batch, which is %.6g here",
        max_steps,
        state.batches,
        batches,
        name,
        state.step / max(1, state.batches),
    )


def _count(run: Run) -> float:
    """The samples, tokens or epochs so far, in the unit of ``max_duration``."""
    length = run.control.max_length
    assert length is not None
    return float(run.epochs or 0) if length.unit == "epochs" else run.clock.count(length.unit, run.step)


def report_limit_passed(run: Run) -> None:
    """Warn that a resumed training has trained nothing, because the training before it had reached a limit of this run already."""
    state, control = run.state, run.control
    at, name, setting = (
        (f"step {state.step}", "max_steps", control.max_steps)
        if run.stop_reason.startswith("max_steps")
        else (f"epoch {state.finished_epochs}", "max_epochs", control.max_epochs)
        if run.stop_reason.startswith("max_epochs")
        else (f"{_count(run)} {control.max_length.unit}", "max_duration", control.max_length)
        if control.max_length is not None and run.stop_reason.startswith("max_duration")
        else (f"{control.elapsed_s:.0f} s of training", "max_time", control.max_time)
    )
    logger.warning(
        "nothing was trained: the resumed training is at %s, and %s=%s was reached before. Limits count from the beginning of the training: "
        "give a higher one to go on, or Resume(path, weights_only=True) to begin a new training with these weights",
        at,
        name,
        setting,
    )


def report_stop_of_resumed(run: Run) -> None:
    """Warn that a resumed training trains nothing, because the training before it was asked to stop at this step."""
    if run.is_main_process:
        logger.warning(
            "nothing is trained: the resumed training was asked to stop, and stops at step %d (%s). Once it has ended, it trains on when it is "
            "resumed with resume='last', or with 'auto' and a higher limit (max_epochs, max_steps, max_time, max_duration)",
            run.step,
            run.stop_reason,
        )


def without_loss(module: TrainModule, optimization: Optimization) -> str:
    """The message of an error: ``training_step`` has returned no loss for any batch."""
    windows = optimization.windows_without_loss
    if not optimization.samples_left_out:
        return (
            f"every batch ({windows} windows) was None or without samples, and {type(module).__name__}.training_step returned None for it, so "
            "nothing was trained: the loader or its collate function leaves out all samples; if the batches are None on purpose, return the loss"
        )
    return (
        f"{type(module).__name__}.training_step returned None for every batch ({windows} windows), so nothing was trained: "
        "return the loss. None leaves a batch out, and configure_optimizers that returns [] trains nothing on purpose"
    )


def report_nonfinite(run: Run) -> None:
    """Warn if the training has left weights that are not finite, and set :attr:`engine.loop.run.Run.nonfinite`. Waits for the device.

    A loss that is NaN makes the weights NaN, and they stay NaN. So this finds what has happened between log boundaries, and what no loss shows: in
    manual optimization, or in the running statistics of batch norms, which a skipped step has changed, too.
    """
    if not run.state.step:
        return
    names = sorted(set().union(*gather_json(run.engine.group, _nonfinite(run))))
    run.nonfinite = tuple(names[:MOST])
    if names and run.is_main_process and "nonfinite" not in run.warned:
        logger.warning(
            "the training ends at step %d with weights that are NaN or infinite: %s%s. Continue from an earlier checkpoint; "
            "Fit(on_nonfinite='raise') ends a run at the first such step and names the parameters, 'skip' leaves such steps out, "
            "detect_anomaly=True finds the operation",
            run.step,
            ", ".join(names[:MOST]),
            f" and {len(names) - MOST} more" if len(names) > MOST else "",
        )


def name_step(run: Run, error: BaseException) -> None:
    """Add to the message of ``error``, if it is that of a step which ``on_nonfinite="raise"`` has refused, the step and how to repeat it."""
    failure = run.engine.nonfinite_step
    if failure is None or failure.error is not error:
        return
    step = run.state.step + 1
    error.args = (
        f"{failure.problem} in step {step} ({_place(run, failure.at_once)}){failure.consequence}. {_advice(run, step)}",
    )


def _place(run: Run, at_once: bool) -> str:
    """The epoch of the step and, if the step is still in progress, its micro-batches on this rank. On a device the answer may come a step later."""
    state = run.state
    if not at_once:
        return f"epoch {state.epoch}"
    optimization = run.optimization
    last = state.batch_idx - (1 if optimization is not None and optimization.accumulates else 0)
    first = min(state.whole_batches, last)
    return f"epoch {state.epoch}, micro-batch{f' {last}' if first == last else f'es {first} to {last}'}"


def _advice(run: Run, step: int) -> str:
    """The call and the command that repeat the step, or what to set so that it can be repeated."""
    checkpoints = run.checkpoints
    saved = checkpoints.saved is not None or checkpoints.loaded_from is not None
    if not saved and run.settings.seed is None:
        return (
            "This step cannot be repeated, because the run has neither a checkpoint from before it nor a seed: train with Fit(seed=), or save "
            "with ModelCheckpoint(every=...)"
        )
    sees = "names its samples, its losses and the first number that is not finite"
    if checkpoints.saved is not None:
        folder = checkpoints.saved_in.storage.root.rstrip("/").removesuffix("/checkpoints")
    else:
        folder = str(checkpoints.run_folder.path) if _has_files(checkpoints.run_folder.path) else ""
    if not folder:
        return f"Fit.replay(module, loader, step={step}) in the script, with a new module, repeats this step and {sees}"
    return (
        f"Fit.replay(module, loader, run={folder!r}, step={step}) in the script, or fit replay {shlex.quote(folder)} --step {step} --target "
        f"FILE:MODULE --data FILE:LOADER, repeats this step and {sees}"
    )


def _has_files(folder: Path) -> bool:
    """Whether a run's folder has anything but its record: otherwise both are removed at the end of the run."""
    try:
        return any(
            entry.name != RUN and (not entry.is_dir() or any(Path(entry).iterdir())) for entry in folder.iterdir()
        )
    except OSError:
        return False


@torch.no_grad()
def _nonfinite(run: Run) -> list[str]:
    """The names of this rank's trained parameters that are not finite, and of its buffers with a NaN; a buffer may be infinite, as a mask is."""
    flags = dict[str, Tensor]()
    for name, parameter in run.module.named_parameters():
        if parameter.requires_grad and (values := _values(parameter)) is not None:
            flags[name] = ~values.isfinite().all()
    for name, buffer in run.module.named_buffers():
        if (values := _values(buffer)) is not None:
            flags[name] = values.isnan().any()
    if not flags:
        return []
    are_bad = torch.stack([flag.to(run.device) for flag in flags.values()]).tolist()  # waits for the device once
    return [name for name, is_bad in zip(flags, are_bad, strict=True) if is_bad]


def _values(tensor: Tensor) -> Tensor | None:
    """This rank's values of a tensor in a format that can be checked; ``None`` if there are none: it has no elements here, or is of integers."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta" or not tensor.numel():
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor
