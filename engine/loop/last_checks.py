"""Checks at the end of a training, for what no step has reported."""

from __future__ import annotations

import torch
from torch import Tensor

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


def report_limit_passed(run: Run) -> None:
    """Warn that a resumed training has trained nothing, because the training before it had reached a limit of this run already."""
    settings, state, control = run.settings, run.state, run.control
    at, name, setting = (
        (f"step {state.step}", "max_steps", control.max_steps)
        if run.stop_reason.startswith("max_steps")
        else (f"epoch {state.finished_epochs}", "max_epochs", control.max_epochs)
        if run.stop_reason.startswith("max_epochs")
        else (f"{control.elapsed_s:.0f} s of training", "max_time", settings.max_time)
    )
    logger.warning(
        "nothing was trained: the resumed training is at %s, and %s=%s was reached before. Limits count from the beginning of the training: "
        "give a higher one to go on, or Resume(path, weights_only=True) to begin a new training with these weights",
        at,
        name,
        setting,
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
