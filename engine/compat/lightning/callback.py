"""Callbacks with Lightning's signature, ``(trainer, pl_module, ...)``, as callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engine.callback import Callback as OwnCallback
from engine.loop.run import Run
from engine.step.gradients import Loss, nonzero

_NOT_THEIRS = ("on_before_log", "on_log", "on_media", "on_checkpoint_saved", "on_checkpoint_removed")
EVENTS = tuple(
    name
    for name in vars(OwnCallback)
    if (name.startswith("on_") or name in ("setup", "teardown")) and name not in _NOT_THEIRS
)
"""Those that Lightning has too."""


_CALLED = (*EVENTS, "write_on_batch_end", "write_on_epoch_end", "get_metrics")
"""Methods that are called with ``(trainer, pl_module, ...)``."""


class Callback(OwnCallback):
    """Subclass it as Lightning's: its events get ``(trainer, pl_module, ...)``, here and in a plain :class:`engine.Fit`.

    A class that also inherits from a callback of this library may override that one's events, with Lightning's signature.
    """

    idle = False
    """The trainer leaves it out: it was asked to do nothing."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for event in (each for each in _CALLED if hasattr(cls, each)):
            owner = next(each for each in cls.__mro__ if event in vars(each))
            method = vars(owner)[event]
            if owner is not OwnCallback and not hasattr(method, "translates"):
                ours = issubclass(owner, OwnCallback) and not issubclass(owner, Callback)
                setattr(cls, event, _with_run(method) if ours else _with_trainer(event, method))

    def _generate_state_key(self, **values: Any) -> str:
        return f"{type(self).__qualname__}{values!r}"


def step_output(run: Run, outputs: Any) -> dict[str, Any]:
    """What ``training_step`` returned, as Lightning gives it to ``on_train_batch_end``: a dict whose ``"loss"`` is detached and, in automatic
    optimization, divided by the window's number of micro-batches."""
    found = dict(outputs) if isinstance(outputs, Mapping) else {} if outputs is None else {"loss": outputs}
    loss = found.get("loss")
    if isinstance(loss, Loss):
        loss = loss.sum / nonzero(loss.count)
    if isinstance(loss, Tensor):
        window = run.window_at(run.state.epoch) if run.module.automatic_optimization else 1
        found["loss"] = loss.detach() if window == 1 else loss.detach() / window
    return found


def _with_trainer(event: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """An event with Lightning's signature, which a run calls, or a subclass. What it returns has no meaning there."""

    @functools.wraps(method)
    def call(self: Any, run: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if event == "on_train_batch_end" and isinstance(run, Run):
            args = (step_output(run, args[0]), *args[1:])
        value = method(self, getattr(run, "trainer", run), vars(module).get("foreign", module), *args, **kwargs)
        return value if event == "get_metrics" else None

    call.translates = True  # type: ignore[attr-defined]
    return call


def _with_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """An event of this library's callbacks, which a subclass may call with its trainer."""

    @functools.wraps(method)
    def event(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, getattr(trainer, "run", trainer), *args, **kwargs)

    event.translates = True  # type: ignore[attr-defined]
    return event


def listens(callback: Callback, event: str, function: Callable[..., Any]) -> None:
    """Let the ``callback`` call a ``function`` with Lightning's arguments at an ``event``."""
    call = _with_trainer(event, lambda self, *args, **kwargs: function(*args, **kwargs))
    setattr(callback, event, functools.partial(call, callback))


class Adapted(Callback):
    """A callback of the installed Lightning, ``foreign``, as one of :class:`engine.Fit`; its trainer is ``run.trainer``."""

    def __init__(self, foreign: Any) -> None:
        self.foreign = foreign
        base = next(each for each in reversed(type(foreign).__mro__) if hasattr(each, "on_train_batch_end"))
        for event in (*EVENTS, "state_dict", "load_state_dict"):
            method = getattr(foreign, event)
            if getattr(method, "__func__", None) is not getattr(base, event):
                listens(self, event, method) if event in EVENTS else setattr(self, event, method)

    @property
    def state_key(self) -> str:
        return str(self.foreign.state_key)


_KINDS = {
    "Checkpoint": ("is_checkpoint", "runs_last"),
    "EarlyStopping": ("is_early_stopping",),
    "ProgressBar": ("shows_progress",),
}
"""Lightning's classes of callbacks, with what they are here."""


@functools.cache
def adapted_class(kind: Any) -> type[Adapted]:
    """The class of the callbacks that stand for objects of ``kind``: a module's replace a trainer's of the same class."""
    return type(
        kind.__name__, (Adapted,), {name: True for base in _KINDS if lightnings(kind, base) for name in _KINDS[base]}
    )


def lightnings(kind: type, name: str) -> Any:
    """The installed Lightning's class of this name among the bases of ``kind``; ``None``: there is none."""
    theirs = ("lightning.pytorch.", "pytorch_lightning.")
    return next((each for each in kind.__mro__ if each.__name__ == name and each.__module__.startswith(theirs)), None)
