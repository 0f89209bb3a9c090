"""The rows of the tables of other trainers' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ANY: tuple[Any, ...] = (object(),)
"""For ``Argument(neutral=ANY)``: the drop-in class takes any value, which changes nothing: a message, a layout."""


@dataclass(frozen=True)
class Argument:
    """An argument of another trainer's constructor."""

    usual: Any = None
    """The argument's default in its trainer."""
    setting: str = ""
    """Our setting, or argument, with the argument's meaning and values; empty: there is none."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing, where every other value is an error; or :data:`ANY`. Empty: the drop-in class translates the argument."""
    instead: str = ""
    """Advice: the end of the errors of ``Fit``, of our class and of the drop-in class, and the line of ``fit migrate``."""
    drop_in: str = ""
    """The end of the drop-in class's error, if ``instead`` names what that class does not have."""
    with_validation: str = ""
    """Why ``True`` is an error in a training with validation, and what to do."""
    in_file: str = ""
    """The note of a converted file about an argument that is not read there."""

    @property
    def answer(self) -> str:
        """The sentence about the argument: :attr:`instead`, or its name here; empty if it has neither."""
        return self.instead or (called(self.setting) if self.setting else "")

    def refuses(self, value: object) -> bool:
        """Whether the value asks for something that has no counterpart."""
        return bool(self.neutral) and self.neutral is not ANY and value not in self.neutral


def called(name: str) -> str:
    """The sentence about something that only has another name here."""
    return f"here it is called {name!r}"
