"""Errors about names and arguments of Lightning that have no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never


def leave_out(call: str, given: Mapping[str, Any], reasons: Mapping[str, tuple[Any, str]]) -> None:
    """Check that each argument of :paramref:`reasons` has its neutral value.

    Args:
        given: the arguments of ``call``, by name.
        reasons: by argument, its neutral value and what to do instead of another.

    Raises:
        ValueError: one has another value; the message says what to do.
    """
    for name, (neutral, instead) in reasons.items():
        if name in given and given[name] is not neutral and given[name] != neutral:
            raise ValueError(f"{call}({name}={given[name]!r}) has no counterpart: {instead}")


def unknown(call: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that nothing here reads.

    Raises:
        TypeError: there is one.
    """
    for name in given:
        raise TypeError(f"{call}() got an argument {name!r} that has no counterpart here: leave it out")


def refused_class(name: str, instead: str) -> type[Any]:
    """A class that can be imported and named, and not made: making it is an error that says what to use ``instead``."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError(f"{name} has no counterpart of this form: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Cannot be made: {instead}."})
