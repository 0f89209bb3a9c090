"""What a plan has assumed where a training reads values, which tensors of a plan do not have."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import engine
from engine.planning import torch_private

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(engine.__file__).parent)
_SIGNS = ("faketensor", "fake tensor", "data is not allocated", "data pointer", "tensor subclasses", "meta tensor")
"""What torch's errors about tensors without values say."""


class Answers:
    """Notes what a :class:`engine.planning.torch_private.Simulation` answers, with the line of the user's code that asked.

    The library's own questions have the usual answer, 0: no gradient is infinite.
    """

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __call__(self, question: str, answer: Any) -> bool:
        """Note it, unless the library has asked; whether it was noted."""
        place = _asking(sys._getframe(1))
        if place is not None:
            self._found[f"{place} {question}: the plan continues with {answer}"] = None
        return place is not None

    def sentences(self) -> tuple[str, ...]:
        """One for each line that asked."""
        return tuple(self._found)

    def explain(self, error: Exception) -> bool:
        """Whether an error of the training comes from values that are not there, or from an answer, and not from the training itself."""
        said = str(error).lower()
        return isinstance(error, torch_private.UNREADABLE) or bool(self._found) or any(sign in said for sign in _SIGNS)

    def place(self, error: Exception) -> str:
        """The user's line in an error's traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not each.filename.startswith((_TORCH, _OWN, "<"))]
        last = (own or frames)[-1]
        return f"{last.filename}:{last.lineno} ({last.line})"


def _asking(frame: FrameType | None) -> str | None:
    """The line outside of torch that needs a value; ``None`` if it is the library's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN) and "planning" not in name:
            return None
        if not name.startswith((_TORCH, _OWN, "<")):
            return f"{name}:{frame.f_lineno} ({linecache.getline(name, frame.f_lineno).strip()})"
        frame = frame.f_back
    return None


__all__ = ["Answers"]
