"""Refuses arguments and classes of other trainers that have no counterpart, with errors that say what to use instead."""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NoReturn

from engine.compat.table_rows import Argument


def translated(call: str, values: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Return ``values``, another trainer's arguments of ``call``, without those that have no counterpart.

    An argument without a counterpart may only have a value that changes nothing.

    Raises:
        ValueError: such an argument has another value.
    """
    for name, argument in arguments.items():
        if name in values and argument.refuses(values[name]):
            raise ValueError(
                f"{call}({name}={values[name]!r}) has no counterpart: {argument.drop_in or argument.instead}"
            )
    return {name: value for name, value in values.items() if name not in arguments or not arguments[name].neutral}


class StandIn(ABCMeta):
    """The metaclass of classes that stand for another trainer's: they can be imported, subclassed and used as annotations, but not called."""

    refused: str
    """Advice: the name of the counterpart, or another way."""
    stands_for: str
    """The other trainer's name."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(sentence(cls))

    def __getattr__(cls, name: str) -> Any:
        reason = "" if name.startswith("__") else f": {sentence(cls)}"
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}{reason}", name=name, obj=cls)


class StandInObject:
    """Stands for another object of another trainer, such as a registry: any use of it raises an error."""

    def __init__(self, name: str, instead: str) -> None:
        self.stands_for, self.refused = name, instead

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self.stands_for}.{name}: {sentence(self)}", name=name, obj=self)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(sentence(self))

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse


@functools.cache
def refused_class(name: str, instead: str, module: str = __name__) -> type[Any]:
    """A class that can be imported and subclassed, but raises an error when it is called, which says what to use ``instead``."""
    content = {"refused": instead, "stands_for": name, "__module__": module, "__doc__": f"Cannot be made: {instead}."}
    return StandIn(name, (), {**content, "__class_getitem__": classmethod(lambda cls, item: cls)})


@functools.cache
def refused_function(name: str, instead: str, module: str = __name__) -> Callable[..., NoReturn]:
    """A function that can be imported, but raises an error when it is called, which says what to use ``instead``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(sentence(refuse))

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__ = module
    refuse.refused, refuse.stands_for = instead, name  # type: ignore[attr-defined]
    return refuse


def sentence(stand_in: Any) -> str:
    """The text of the error about a stand-in."""
    return f"{stand_in.stands_for} has no counterpart: {stand_in.refused}"


def refuse_stand_ins(call: str, arguments: Iterable[Any]) -> None:
    """Check the arguments of a ``call``, and the entries of those that are lists.

    Raises:
        NotImplementedError: one is a stand-in for another trainer's class, function or object.
    """
    for value in arguments:
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            is_function = isinstance(entry, FunctionType) and "refused" in vars(entry)
            if is_function or isinstance(entry, (StandIn, StandInObject)):
                raise NotImplementedError(f"{call}: {sentence(entry)}")
