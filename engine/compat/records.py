"""The rows of the tables of other trainers' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """An argument of another trainer's constructor."""

    usual: Any = None
    """Its default there."""
    setting: str = ""
    """The setting of ours that means the same, with the same values."""
    neutral: tuple[Any, ...] = ()
    """Values under which nothing is asked for, if another one is an error."""
    instead: str = ""
    """What to do here: the end of the errors of ``Fit`` and of the drop-in class, and the line of ``fit migrate``."""
    in_file: str = ""
    """The note of a converted file about an argument that is not read there."""


def called(name: str) -> str:
    """The sentence about something that only has another name here."""
    return f"here it is called {name!r}"
