"""The events that Lightning has too, and their arguments: ours as Lightning's, and back."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torch import Tensor

from engine.callback import Callback
from engine.loop.run import Run
from engine.step.gradients import Loss, nonzero

_OURS = ("on_before_log", "on_log", "on_media", "on_checkpoint_saved", "on_checkpoint_removed")
EVENTS = tuple(
    name for name in vars(Callback) if (name.startswith("on_") or name in ("setup", "teardown")) and name not in _OURS
)
"""Those that Lightning has too."""
CALLED = (*EVENTS, "write_on_batch_end", "write_on_epoch_end", "get_metrics")
"""Methods of callbacks that are called with ``(trainer, pl_module, ...)``."""


class TrainerFn(StrEnum):
    """The method of the trainer that was called: the ``stage`` of ``setup`` and ``teardown``."""

    FITTING, VALIDATING, TESTING, PREDICTING = "fit", "validate", "test", "predict"


class RunningStage(StrEnum):
    """The part of a call that is under way; a validation within a training is ``"validate"``."""

    TRAINING, SANITY_CHECKING, VALIDATING, TESTING, PREDICTING = "train", "sanity_check", "validate", "test", "predict"


class TrainerStatus(StrEnum):
    """The state of a trainer; a view of a run is ``"running"`` or ``"interrupted"``."""

    INITIALIZING, RUNNING, FINISHED, INTERRUPTED = "initializing", "running", "finished", "interrupted"


class Adapter:
    """The base of objects that stand for one of the installed Lightning, ``original``, in a run."""

    original: Any


def original(value: Any) -> Any:
    """The user's object behind one that stands for it here."""
    return value.original if isinstance(value, Adapter) else value


def lightning_arguments(event: str, run: Any, module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an event here as Lightning's: ``(trainer, pl_module, ...)``. A subclass that calls its base gives Lightning's already."""
    if event == "on_train_batch_end" and isinstance(run, Run):
        arguments = (step_output(run, arguments[0]), *arguments[1:])
    elif event in ("setup", "teardown"):
        arguments = (TrainerFn(arguments[0]), *arguments[1:])
    return getattr(run, "trainer", run), original(module), *arguments


def run_of(trainer: Any) -> Any:
    """The run, for an event of ours that Lightning's arguments come to."""
    return getattr(trainer, "run", trainer)


def step_output(run: Run, outputs: Any) -> dict[str, Any]:
    """What ``training_step`` returned, as Lightning gives it to ``on_train_batch_end``: a dict whose ``"loss"`` is detached and, in automatic
    optimization, divided by the window's number of micro-batches."""
    entries = dict(outputs) if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
    loss = entries.get("loss")
    if isinstance(loss, Loss):
        loss = loss.sum / nonzero(loss.count)
    if isinstance(loss, Tensor):
        window = run.window_at(run.state.epoch) if run.module.automatic_optimization else 1
        entries["loss"] = loss.detach() if window == 1 else loss.detach() / window
    return entries
