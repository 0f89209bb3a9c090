"""Callbacks with Lightning's signature, ``(trainer, pl_module, ...)``, as callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from engine.callback import Callback as OwnCallback
from engine.compat.lightning.events import CALLED, EVENTS, Adapter, lightning_arguments, run_of


class Callback(OwnCallback):
    """Subclass it as Lightning's: its events get ``(trainer, pl_module, ...)``, here and in a plain :class:`engine.Fit`.

    A class that also inherits from a callback of this library may override that one's events, with Lightning's signature.
    """

    idle = False
    """The trainer leaves it out: it was asked to do nothing."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for event in (each for each in CALLED if hasattr(cls, each)):
            owner = next(each for each in cls.__mro__ if event in vars(each))
            method = vars(owner)[event]
            if owner is not OwnCallback and not hasattr(method, "translates"):
                ours = issubclass(owner, OwnCallback) and not issubclass(owner, Callback)
                setattr(cls, event, _with_run(method) if ours else _with_trainer(event, method))

    def _generate_state_key(self, **values: Any) -> str:
        return f"{type(self).__qualname__}{values!r}"


def _with_trainer(event: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """An event with Lightning's signature, which a run calls, or a subclass. What it returns has no meaning there."""

    @functools.wraps(method)
    def call(self: Any, run: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        value = method(self, *lightning_arguments(event, run, module, args), **kwargs)
        return value if event == "get_metrics" else None

    call.translates = True  # type: ignore[attr-defined]
    return call


def _with_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """An event of this library's callbacks, which a subclass may call with its trainer."""

    @functools.wraps(method)
    def event(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, run_of(trainer), *args, **kwargs)

    event.translates = True  # type: ignore[attr-defined]
    return event


def listens(callback: Callback, event: str, function: Callable[..., Any]) -> None:
    """Let the ``callback`` call a ``function`` with Lightning's arguments at an ``event``."""
    call = _with_trainer(event, lambda self, *args, **kwargs: function(*args, **kwargs))
    setattr(callback, event, functools.partial(call, callback))


class AdaptedCallback(Callback, Adapter):
    """A callback of the installed Lightning, ``original``, as one of :class:`engine.Fit`; its trainer is ``run.trainer``."""

    def __init__(self, original: Any) -> None:
        self.original = original
        base = next(each for each in reversed(type(original).__mro__) if hasattr(each, "on_train_batch_end"))
        for event in (*EVENTS, "state_dict", "load_state_dict"):
            method = getattr(original, event)
            if getattr(method, "__func__", None) is not getattr(base, event):
                listens(self, event, method) if event in EVENTS else setattr(self, event, method)

    @property
    def state_key(self) -> str:
        return str(self.original.state_key)


_KINDS = {
    "Checkpoint": ("is_checkpoint", "runs_last"),
    "EarlyStopping": ("is_early_stopping",),
    "ProgressBar": ("shows_progress",),
}
"""Lightning's classes of callbacks, with what they are here."""


@functools.cache
def adapted_class(kind: Any) -> type[AdaptedCallback]:
    """The class of the callbacks that stand for objects of ``kind``: a module's replace a trainer's of the same class."""
    return type(
        kind.__name__,
        (AdaptedCallback,),
        {name: True for base in _KINDS if lightnings(kind, base) for name in _KINDS[base]},
    )


def lightnings(kind: type, name: str) -> Any:
    """The installed Lightning's class of this name among the bases of ``kind``; ``None``: there is none."""
    theirs = ("lightning.pytorch.", "pytorch_lightning.")
    return next((each for each in kind.__mro__ if each.__name__ == name and each.__module__.startswith(theirs)), None)
