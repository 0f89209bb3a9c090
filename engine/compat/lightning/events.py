"""The events that Lightning has too, and their arguments: ours as Lightning's, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Self

from torch import Tensor

from engine.callback import Callback
from engine.loop.run import Run
from engine.step.gradients import Loss, nonzero
from engine.utils.overrides import overridden

_OURS = ("on_before_log", "on_log", "on_media", "on_checkpoint_saved", "on_checkpoint_removed")
EVENTS = tuple(
    name for name in vars(Callback) if (name.startswith("on_") or name in ("setup", "teardown")) and name not in _OURS
)
"""Events that Lightning has too."""
CALLED = (*EVENTS, "write_on_batch_end", "write_on_epoch_end", "get_metrics")
"""Methods of callbacks that are called with ``(trainer, pl_module, ...)``."""
_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
WITH_STAGE = ("setup", "teardown")
"""Events that get a :class:`TrainerFn`."""


class TrainerFn(StrEnum):
    """The method of the trainer that was called: the ``stage`` of ``setup`` and ``teardown``."""

    FITTING, VALIDATING, TESTING, PREDICTING = "fit", "validate", "test", "predict"


class RunningStage(StrEnum):
    """The part of a call that is under way; a validation within a training is ``"validate"``."""

    TRAINING, SANITY_CHECKING, VALIDATING, TESTING, PREDICTING = "train", "sanity_check", "validate", "test", "predict"


class TrainerStatus(StrEnum):
    """The state of a trainer; a view of a run is ``"running"`` or ``"interrupted"``."""

    INITIALIZING, RUNNING, FINISHED, INTERRUPTED = "initializing", "running", "finished", "interrupted"


def is_lightnings(kind: type) -> bool:
    """Whether a class is the installed Lightning's own."""
    return kind.__module__.startswith(_PACKAGES)


class Adapter:
    """The base of objects that stand for one of the installed Lightning, ``original``, in a run."""

    original: Any
    user_classes: tuple[type, ...]
    """The user's classes behind the object, in their order."""

    @classmethod
    def standing_for(cls, kind: type, **space: Any) -> type[Self]:
        """The subclass for objects of ``kind``, whose name messages have."""
        users = tuple(base for base in kind.__mro__ if not is_lightnings(base))
        return type(kind.__name__, (cls,), {"__module__": kind.__module__, "user_classes": users, **space})

    def forward_overrides(self, base: type, names: Iterable[str]) -> None:
        """Take the methods ``names`` from ``original``, where it or its class overrides Lightning's class ``base``."""
        for name in names:
            vars(self).pop(name, None)
            if overridden(self.original, name, base):
                vars(self)[name] = self.translated(name, getattr(self.original, name))

    def translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The ``method`` of the user's object with the arguments that a run gives."""
        return method


def original(value: Any) -> Any:
    """The user's object behind one that stands for it here."""
    return value.original if isinstance(value, Adapter) else value


def lightning_arguments(event: str, run_or_trainer: Any, module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an event here as Lightning's: ``(trainer, pl_module, ...)``. A subclass that calls its base gives Lightning's already."""
    if event == "on_train_batch_end" and isinstance(run_or_trainer, Run):
        arguments = (step_output(run_or_trainer, arguments[0]), *arguments[1:])
    elif event in WITH_STAGE and arguments:
        arguments = (TrainerFn(arguments[0]), *arguments[1:])
    return getattr(run_or_trainer, "trainer", run_or_trainer), original(module), *arguments


def with_stage(method: Callable[..., Any]) -> Callable[..., Any]:
    """A ``setup`` or ``teardown`` of a data module that gets its stage as a :class:`TrainerFn`, which is a text too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*map(_as_stage, args), **{name: _as_stage(value) for name, value in kwargs.items()})

    return call


def _as_stage(value: Any) -> Any:
    return TrainerFn(value) if isinstance(value, str) and value in list(TrainerFn) else value


def run_of(trainer: Any) -> Any:
    """The run, for an event of ours that Lightning's arguments come to."""
    return getattr(trainer, "run", trainer)


def step_output(run: Run, outputs: Any) -> dict[str, Any]:
    """The result of ``training_step`` as Lightning gives it to ``on_train_batch_end``: a dict whose ``"loss"`` is detached and, in automatic
    optimization, divided by the window's number of micro-batches."""
    entries = dict(outputs) if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
    loss = entries.get("loss")
    if isinstance(loss, Loss):
        loss = loss.sum / nonzero(loss.count)
    if isinstance(loss, Tensor):
        window = run.window_at(run.state.epoch) if run.module.automatic_optimization else 1
        entries["loss"] = loss.detach() if window == 1 else loss.detach() / window
    return entries
