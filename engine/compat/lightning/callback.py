"""Callbacks with Lightning's signature, ``(trainer, pl_module, ...)``, as callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from engine.callback import Callback as OwnCallback
from engine.compat.lightning.events import CALLED, EVENTS, Adapter, is_lightnings, lightning_arguments, run_of
from engine.loop.method_arguments import accepting


class Callback(OwnCallback):
    """Subclass it as Lightning's: its events get ``(trainer, pl_module, ...)``, here and in a plain :class:`engine.Fit`.

    A class that also inherits from a callback of this library may override that one's events, with Lightning's signature.
    """

    idle = False
    """Whether the trainer leaves the callback out, because it was asked to do nothing."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for event in CALLED:
            owner = next((base for base in cls.__mro__ if event in vars(base)), OwnCallback)
            method = vars(owner).get(event)
            if owner is not OwnCallback and method is not None and not _translates(method):
                is_own = issubclass(owner, OwnCallback) and not issubclass(owner, Callback)
                setattr(cls, event, _with_run(method) if is_own else _with_trainer(event, _function(method)))

    def __setattr__(self, name: str, value: Any) -> None:
        hook = name in CALLED and callable(value) and not _translates(value)
        super().__setattr__(name, listener(self, name, value) if hook else value)

    def _generate_state_key(self, **values: Any) -> str:
        return f"{type(self).__qualname__}{values!r}"


def _translates(method: Any) -> bool:
    return getattr(method, "translates", None) is True


def _with_trainer(event: str, method: Callable[..., Any], bound: bool = False) -> Callable[..., Any]:
    """An event with Lightning's signature, which a run calls, or a subclass. What it returns has no meaning there.

    ``bound``: the method does not take the callback first.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner, (run, module, *arguments) = ((), args) if bound else (args[:1], args[1:])
        value = method(*owner, *lightning_arguments(event, run, module, tuple(arguments)), **kwargs)
        return value if event == "get_metrics" else None

    call.translates = True  # type: ignore[attr-defined]
    return call


def _function(method: Any) -> Callable[..., Any]:
    """A static or class method, or another attribute that can be called on an object, as a function that takes the object first."""
    if isinstance(method, FunctionType):
        return method

    def bound(owner: object) -> Any:
        return method.__get__(owner, type(owner)) if hasattr(method, "__get__") else method

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(self)(*args, **kwargs)

    if not isinstance(method, property):
        takes = inspect.signature(bound(object()))
        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = takes.replace(parameters=[receiver, *takes.parameters.values()])  # type: ignore[attr-defined]
    return call


def _with_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """An event of this library's callbacks, which a subclass may call with its trainer."""

    @functools.wraps(method)
    def event(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, run_of(trainer), *args, **kwargs)

    event.translates = True  # type: ignore[attr-defined]
    return event


def listener(owner: OwnCallback, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A ``function`` with Lightning's signature as a hook of the callback ``owner``.

    Raises:
        TypeError: it takes other arguments.
    """
    if event in EVENTS:
        function = accepting(function, owner, event, OwnCallback, ("trainer", "pl_module"))

    return _with_trainer(event, function, bound=True)


class AdaptedCallback(OwnCallback, Adapter):
    """A callback of the installed Lightning, ``original``, as one of :class:`engine.Fit`; its trainer is ``run.trainer``."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.forward_overrides(lightnings(type(original), "Callback"), (*EVENTS, "state_dict", "load_state_dict"))

    def translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return listener(self, name, method) if name in EVENTS else method

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
    space = {name: True for base in _KINDS if lightnings(kind, base) for name in _KINDS[base]}
    return AdaptedCallback.standing_for(kind, **space)


def lightnings(kind: type, name: str) -> Any:
    """The installed Lightning's class of this name among the bases of ``kind``; ``None``: there is none."""
    return next((base for base in kind.__mro__ if base.__name__ == name and is_lightnings(base)), None)
