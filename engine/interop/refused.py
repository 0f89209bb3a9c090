"""Names of other trainers that can be imported, and have no counterpart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


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
