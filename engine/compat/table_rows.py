"""The rows of the tables of other trainers' arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ANY: tuple[Any, ...] = (object(),)
"""For ``Argument(neutral=ANY)``: the drop-in class accepts any value, because the argument has no effect on results."""


@dataclass(frozen=True)
class Argument:
    """An argument of another trainer's constructor."""

    usual: Any = None
    """The argument's default in its trainer."""
    setting: str = ""
    """Our setting or argument with the same meaning and values; empty if there is none."""
    neutral: tuple[Any, ...] = ()
    """The values that change nothing; any other value is an error. :data:`ANY`: no value is. Empty: the drop-in class translates the argument."""
    instead: str = ""
    """Advice on what to do instead: ends the errors of ``Fit``, our class and the drop-in class, and is printed by ``fit migrate``."""
    drop_in: str = ""
    """Replaces ``instead`` in the drop-in class's error, if ``instead`` mentions something that class lacks."""
    in_file: str = ""
    """The note about an argument of a converted settings file that is not used."""

    @property
    def answer(self) -> str:
        """The advice about the argument: :attr:`instead`, or its name here; empty if it has neither."""
        return self.instead or (called(self.setting) if self.setting else "")

    def refuses(self, value: object) -> bool:
        """Whether the value requests something that has no counterpart."""
        return bool(self.neutral) and self.neutral is not ANY and value not in self.neutral


def called(name: str) -> str:
    """The advice about something that only has another name here."""
    return f"here it is called {name!r}"
