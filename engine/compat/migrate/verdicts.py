"""What a call in a source is here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Signature

from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP
from engine.compat.migrate.signatures import rejected
from engine.compat.names import ARGUMENTS, NAMES, OTHERWISE


@dataclass(frozen=True)
class Side:
    """One of the two functions that may take a call: that of ``engine``, or that of ``engine.interop``.

    ``there``: whether it exists. ``call``: its parameters, ``None`` if Python does not tell. ``name``: for errors, ``"TrainModule.log"``.
    """

    there: bool
    call: Signature | None = None
    name: str = ""

    def refused(self, call: ast.Call) -> list[str]:
        """The arguments of a call that it does not take."""
        if self.call is None:
            return []
        keywords = [each.arg for each in call.keywords if each.arg is not None]
        refused, too_many = rejected(self.call, sum(not isinstance(each, ast.Starred) for each in call.args), keywords)
        return [*refused, *([""] if too_many else [])]


def decided(call: ast.Call, sides: Sequence[Side]) -> tuple[str, list[tuple[str, str]]]:
    """The verdict about a call, and for one that neither side takes its arguments with what to do about each."""
    least: list[tuple[str, str]] = []
    for verdict, side in zip((AS_IS, INTEROP), sides, strict=True):
        if side.there:
            refused = side.refused(call)
            if not refused:
                return verdict, []
            least = [(name, _about(name, sides)) for name in refused]
    return CHANGE, least


def _about(name: str, sides: Sequence[Side]) -> str:
    """What to do about an argument that a call does not take."""
    for side in sides:
        if name in ARGUMENTS.get(side.name, {}):
            return ARGUMENTS[side.name][name]
    if name in NAMES:
        return f"here it is called {NAMES[name]!r}"
    return OTHERWISE.get(name, "it takes fewer arguments by position" if not name else "there is no such argument here")
