"""Refuses arguments and classes of other trainers that have no counterpart, with errors that say what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

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


def refusing(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a module that makes each of ``names`` a refused class; the values say what to use instead."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return refused_class(name, names[name])

    return attribute


@functools.cache
def refused_class(name: str, instead: str) -> type[Any]:
    """A class that can be imported, but raises an error when it is instantiated, which says what to use ``instead``."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} has no counterpart: {instead}")

    return type(name, (), {"__init__": refuse, "refused": instead, "__doc__": f"Cannot be made: {instead}."})
