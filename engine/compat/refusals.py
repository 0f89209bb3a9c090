"""Arguments and classes of other trainers that have no counterpart: the error says what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

ANY = object()
"""Any value of an argument changes nothing here: a message, a layout."""


def translated(
    call: str, order: str, args: Any, given: Mapping[str, Any], without: Mapping[str, Any]
) -> dict[str, Any]:
    """Another trainer's arguments of ``call`` by name (``order``: the positional ones'), except those that have no counterpart.

    ``without``: each of these, with the value that asks for nothing (:data:`ANY`), and what to do instead of another.

    Raises:
        TypeError, ValueError: too many arguments, or one that asks for what there is not.
    """
    names = order.split()
    if len(args) > len(names):
        raise TypeError(f"{call}() takes {len(names)} positional arguments, and {len(args)} were given")
    found = dict(zip(names, args, strict=False)) | dict(given)
    for name, (neutral, instead) in without.items():
        if neutral is not ANY and name in found and found[name] is not neutral and found[name] != neutral:
            raise ValueError(f"{call}({name}={found[name]!r}) has no counterpart: {instead}")
    return {name: value for name, value in found.items() if name not in without}


def refusing(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that refuses these ``names``; each says what to use instead."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return refused_class(name, names[name])

    return attribute


@functools.cache
def refused_class(name: str, instead: str) -> type[Any]:
    """A class that can be imported, and not made: that is an error that says what to use ``instead``."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} has no counterpart: {instead}")

    return type(name, (), {"__init__": refuse, "refused": instead, "__doc__": f"Cannot be made: {instead}."})
