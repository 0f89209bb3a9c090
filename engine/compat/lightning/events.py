"""Translates the arguments of events between this library and Lightning."""

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

_OURS = ("on_before_log", "on_log", "on_media", "on_checkpoint_loaded", "on_checkpoint_saved", "on_checkpoint_removed")
EVENTS = tuple(
    name for name in vars(Callback) if (name.startswith("on_") or name in ("setup", "teardown")) and name not in _OURS
)
"""Events that exist in Lightning too."""
CALLED = (*EVENTS, "write_on_batch_end", "write_on_epoch_end", "get_metrics")
"""Methods of Lightning's callbacks that take ``(trainer, pl_module, ...)``."""
_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
WITH_STAGE = ("setup", "teardown")
"""Events whose argument ``stage`` is a :class:`TrainerFn`."""


class TrainerFn(StrEnum):
    """The method of the trainer that was called: the ``stage`` of ``setup`` and ``teardown``."""

    FITTING, VALIDATING, TESTING, PREDICTING = "fit", "validate", "test", "predict"


class RunningStage(StrEnum):
    """The stage that is running; a validation within a training is ``"validate"``."""

    TRAINING, SANITY_CHECKING, VALIDATING, TESTING, PREDICTING = "train", "sanity_check", "validate", "test", "predict"


class TrainerStatus(StrEnum):
    """The state of a trainer; a view of a run is ``"running"`` or ``"interrupted"``."""

    INITIALIZING, RUNNING, FINISHED, INTERRUPTED = "initializing", "running", "finished", "interrupted"


def is_lightning_class(kind: type) -> bool:
    """Whether the installed Lightning defines the class."""
    return kind.__module__.startswith(_PACKAGES)


class Adapter:
    """The base of adapters, which represent an object of the installed Lightning, ``original``, in a run."""

    original: Any
    user_classes: tuple[type, ...]
    """The user's classes among the bases of ``original``'s class, in the order of its MRO."""

    @classmethod
    def subclass_for(cls, kind: type, **attributes: Any) -> type[Self]:
        """Create the adapter class for objects of class ``kind``, with the name and module of ``kind`` and these class attributes."""
        users = tuple(base for base in kind.__mro__ if not is_lightning_class(base))
        return type(kind.__name__, (cls,), {"__module__": kind.__module__, "user_classes": users, **attributes})

    def forward_overrides(self, base: type, names: Iterable[str]) -> None:
        """Forward the methods ``names`` to ``original`` if it, or its class, overrides them over Lightning's class ``base``."""
        for name in names:
            vars(self).pop(name, None)
            if overridden(self.original, name, base):
                vars(self)[name] = self.translated(name, getattr(self.original, name))

    def translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``method`` of the user's object so that it accepts the arguments that a run passes."""
        return method


def original(value: Any) -> Any:
    """The user's object inside an adapter; other values are returned unchanged."""
    return value.original if isinstance(value, Adapter) else value


def lightning_arguments(event: str, run_or_trainer: Any, module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Translate an event's arguments to Lightning's, ``(trainer, pl_module, ...)``. A subclass calling its base passes Lightning's already."""
    if event == "on_train_batch_end" and isinstance(run_or_trainer, Run):
        arguments = (step_output(run_or_trainer, arguments[0]), *arguments[1:])
    elif event in WITH_STAGE and arguments:
        arguments = (TrainerFn(arguments[0]), *arguments[1:])
    return getattr(run_or_trainer, "trainer", run_or_trainer), original(module), *arguments


def with_stage(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``setup`` or ``teardown`` of a data module so that its stage is a :class:`TrainerFn` (a subclass of ``str``)."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*map(_as_stage, args), **{name: _as_stage(value) for name, value in kwargs.items()})

    return call


def _as_stage(value: Any) -> Any:
    return TrainerFn(value) if isinstance(value, str) and value in list(TrainerFn) else value


def run_of(trainer: Any) -> Any:
    """The run of a trainer; a run is returned unchanged."""
    return getattr(trainer, "run", trainer)


def step_output(run: Run, outputs: Any) -> dict[str, Any]:
    """Convert the result of ``training_step`` to what Lightning passes to ``on_train_batch_end``: a dict whose ``"loss"`` is detached and, in
    automatic optimization, divided by the number of micro-batches in the accumulation window."""
    entries = dict(outputs) if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
    loss = entries.get("loss")
    if isinstance(loss, Loss):
        loss = loss.sum / nonzero(loss.count)
    if isinstance(loss, Tensor):
        window = run.window_at(run.state.epoch) if run.module.automatic_optimization else 1
        entries["loss"] = loss.detach() if window == 1 else loss.detach() / window
    return entries
