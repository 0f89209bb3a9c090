"""Adds advice to errors about other trainers' names: what to use here. :mod:`engine.utils.extensions` calls these functions.

:func:`add_advice` wraps methods that no step calls, and adds attributes that raise to classes, so that steps cost nothing extra.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, NoReturn, ParamSpec, TypeVar

from engine.compat.lightning.arguments import STRATEGY_NAMES
from engine.compat.lightning.names import CHECKPOINT, DATA, MODULE, OF_SETTINGS, VIEW
from engine.compat.names import ARGUMENTS, ATTRIBUTES, NAMES, OTHERWISE
from engine.utils.extensions import attribute_error, hint

P = ParamSpec("P")
T = TypeVar("T")
ANSWERS: dict[str, dict[str, str]] = {
    **ATTRIBUTES,
    **ARGUMENTS,
    "TrainModule": MODULE,
    "DataModule": DATA,
    "TrainerView": VIEW,
    "checkpoint entry": CHECKPOINT,
    "setting": OTHERWISE | {name: f"here it is called {setting!r}" for name, setting in NAMES.items()},
    "strategy": {name: f"this name of Lightning's is {setting!r} here" for name, setting in STRATEGY_NAMES.items()},
}
"""Place -> name -> what to use instead. A place is a class, a method, or a kind of name such as ``"setting"``."""
LATER = {"checkpoint's folder": "engine.compat.foreign_checkpoints.folder_files:FOLDER_FILES"}
"""Place -> a table of its names as ``"module:table"``, which is imported when an error first asks for it."""
UNWRAPPED = ("Fit", "TrainModule")
"""Classes whose methods are not wrapped: those of ``Fit`` take unknown arguments and raise :func:`engine.utils.extensions.call_error`, those of
``TrainModule`` are called by steps, and the run adds advice to their errors."""
# Python 3.13 may append its own suggestion to the message, which is not matched.
_UNEXPECTED = re.compile(r"(\w+\.\w+)\(\) got an unexpected keyword argument '(\w+)'")
_CALLS: dict[str, Callable[..., object]] = {}


def advice(place: str, name: str) -> str:
    """Say what to use instead of ``name``, which ``place`` lacks; an empty string if no known trainer has the name."""
    answers: dict[str, str] = resolve_name(LATER[place]) if place in LATER else ANSWERS.get(place, {})
    sentence = answers.get(name, "")
    return sentence or (_setting_instead(name, _CALLS[place]) if place in _CALLS else "")


def add_advice(cls: type[Any]) -> None:
    """Let errors about attributes and arguments that ``cls`` lacks, but other trainers have, say what to use instead."""
    for call in ARGUMENTS:
        owner, _, method = call.partition(".")
        if owner == cls.__name__:
            _CALLS[call] = vars(cls)[method]
            if owner not in UNWRAPPED:
                setattr(cls, method, _explaining(_CALLS[call]))
    if refused := ATTRIBUTES.get(cls.__name__):
        for name, sentence in refused.items():
            setattr(cls, name, _RefusedAttribute(name, sentence))
        setattr(cls, "__dir__", lambda self: [name for name in object.__dir__(self) if name not in refused])  # noqa: B010


def explain_call(error: TypeError) -> None:
    """Add advice to Python's error about an unexpected argument, if the method is one of those in :data:`ARGUMENTS`."""
    message = _UNEXPECTED.match(str(error))
    if message is None or message[1] not in _CALLS:
        return
    call, name = message.groups()
    parameters = [parameter for parameter in inspect.signature(_CALLS[call]).parameters if parameter != "self"]
    error.args = (f"{message[0]}{hint(call, name, parameters)}",)


def _setting_instead(name: str, call: Callable[..., object]) -> str:
    """Say which setting takes the place of an argument that ``call`` lacks; an empty string if none does."""
    if name in NAMES and NAMES[name] not in inspect.signature(call).parameters:
        return f"here it is a setting: Fit({NAMES[name]}=...)"
    if name in OF_SETTINGS:
        return f"here it is a setting: Fit({name}=...)"
    return ANSWERS["setting"].get(name, "")


def _explaining(call: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``call`` so that errors about unexpected arguments contain advice; tracebacks do not show the wrapper."""

    @functools.wraps(call)
    def call_with_hint(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, TypeError):
                explain_call(error)
            if error.__traceback__ is not None:  # drop this wrapper's frame; a bare raise does not add it again
                error.__traceback__ = error.__traceback__.tb_next
            raise

    return call_with_hint


class _RefusedAttribute:
    """An attribute that raises ``AttributeError`` with advice when it is read, and when it is set, because nothing would read it."""

    def __init__(self, name: str, sentence: str) -> None:
        self.name, self.sentence = name, sentence

    def __get__(self, owner: object, kind: type) -> NoReturn:
        if owner is None:
            raise AttributeError(
                f"{kind.__name__!r} has no attribute {self.name!r}: {self.sentence}", name=self.name, obj=kind
            )
        raise attribute_error(owner, self.name, self.sentence)

    def __set__(self, owner: object, value: object) -> NoReturn:
        raise attribute_error(owner, self.name, self.sentence)
