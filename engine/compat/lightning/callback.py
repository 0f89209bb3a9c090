"""Lets callbacks with Lightning's signature, ``(trainer, pl_module, ...)``, work in :class:`engine.Fit`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from engine.callback import Callback as OwnCallback
from engine.compat.lightning.callback_log import Logging
from engine.compat.lightning.events import CALLED, EVENTS, Adapter, is_lightning_class, lightning_arguments, run_of
from engine.loop.method_arguments import accepting


class Callback(Logging, OwnCallback):
    """The base class of callbacks whose events take ``(trainer, pl_module, ...)``, under ``Trainer`` and :class:`engine.Fit`.

    A subclass that also inherits from a callback of this library may override the callback's events, with Lightning's signature.
    """

    idle = False
    """Whether the callback's arguments leave it nothing to do, so that ``Trainer`` does not pass it on to the run."""

    needed: tuple[str, ...] = ()
    """The events in which this class works and Lightning's class of its name does nothing. A subclass there overrides them without calling
    ``super()``, so they are called here, before the subclass's."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        home = next((base for base in cls.__mro__[1:] if vars(base).get("needed")), Callback)
        needed = vars(home).get("needed", ())
        for event in CALLED:
            owner = next((base for base in cls.__mro__ if event in vars(base)), OwnCallback)
            method = vars(owner).get(event)
            if owner is not OwnCallback and method is not None and not _translates(method):
                is_own = issubclass(owner, OwnCallback) and not issubclass(owner, Callback)
                translated = _with_run(method) if is_own else _with_trainer(event, _function(method))
                if event in needed and not issubclass(home, owner) and not _names(event, method):
                    translated = _after(getattr(home, event), translated)
                setattr(cls, event, translated)

    def __setattr__(self, name: str, value: Any) -> None:
        hook = name in CALLED and callable(value) and not _translates(value)
        super().__setattr__(name, listener(self, name, value) if hook else value)

    def _generate_state_key(self, **values: Any) -> str:
        return f"{type(self).__qualname__}{values!r}"


def _translates(method: Any) -> bool:
    return getattr(method, "translates", None) is True


def _names(event: str, method: Any) -> bool:
    """Whether the code of a method names an event, as ``super().on_train_start(...)`` does."""
    codes = [code] if (code := getattr(inspect.unwrap(method), "__code__", None)) is not None else []
    for code in codes:  # grows: functions in functions
        if event in code.co_names:
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _after(inherited: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``method``, an event of a subclass, so that the class's own, ``inherited``, is called before it."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inherited(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return call


def _with_trainer(event: str, method: Callable[..., Any], bound: bool = False) -> Callable[..., Any]:
    """Wrap a method with Lightning's signature so that a run can call it; a subclass may call it with a trainer. Its return value is dropped.

    ``bound``: the method is bound: it does not take the callback as its first argument.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner, (run, module, *arguments) = ((), args) if bound else (args[:1], args[1:])
        value = method(*owner, *lightning_arguments(event, run, module, tuple(arguments)), **kwargs)
        return value if event == "get_metrics" else None

    call.translates = True  # type: ignore[attr-defined]
    return call


def _function(method: Any) -> Callable[..., Any]:
    """Turn a static method, a class method or another callable attribute into a function that takes the object as its first argument."""
    if isinstance(method, FunctionType):
        return method

    def bound(owner: object) -> Any:
        return method.__get__(owner, type(owner)) if hasattr(method, "__get__") else method

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(self)(*args, **kwargs)

    if not isinstance(method, property):
        visible = inspect.signature(bound(object()))
        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = visible.replace(parameters=[receiver, *visible.parameters.values()])  # type: ignore[attr-defined]
    return call


def _with_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event of one of this library's callbacks, so that a subclass may call it with its trainer in place of the run."""

    @functools.wraps(method)
    def event(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, run_of(trainer), *args, **kwargs)

    event.translates = True  # type: ignore[attr-defined]
    return event


def listener(owner: OwnCallback, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``, which has Lightning's signature, as the method ``event`` of the callback ``owner``.

    Raises:
        TypeError: ``function`` takes other arguments.
    """
    if event in EVENTS:
        function = accepting(function, owner, event, OwnCallback, ("trainer", "pl_module"))

    return _with_trainer(event, function, bound=True)


class AdaptedCallback(OwnCallback, Adapter):
    """Lets a callback of the installed Lightning, ``original``, work in :class:`engine.Fit`; its trainer is ``run.trainer``."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.note_methods()

    def note_methods(self) -> None:
        base = lightning_base(type(self.original), "Callback")
        self.forward_overrides(base, (*EVENTS, "state_dict", "load_state_dict"))

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
"""Lightning's callback classes -> the attributes that mark callbacks of this kind here."""


@functools.cache
def adapted_class(kind: Any) -> type[AdaptedCallback]:
    """The adapter class for callbacks of class ``kind``. A module's callbacks replace the trainer's of the same class."""
    attributes = {name: True for base in _KINDS if lightning_base(kind, base) for name in _KINDS[base]}
    return AdaptedCallback.subclass_for(kind, **attributes)


def lightning_base(kind: type, name: str) -> Any:
    """The class of the installed Lightning with this ``name`` among the bases of ``kind``; ``None`` if there is none."""
    return next((base for base in kind.__mro__ if base.__name__ == name and is_lightning_class(base)), None)
