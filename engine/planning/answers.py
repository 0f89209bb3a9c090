"""What a plan has assumed where a training reads values, which tensors of a plan do not have."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from engine.planning import torch_private, zero
from engine.utils import overrides

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(overrides.__file__).parent.parent)
_PLANNING = str(Path(__file__).parent)
_DISTRIBUTIONS = str(Path(torch.__file__).parent / "distributions")
_PACKAGES = "site-packages"
_SIGNS = ("faketensor", "fake tensor", "data is not allocated", "data pointer", "tensor subclasses", "meta tensor")
"""What torch's errors about tensors without values say."""


class Answers:
    """Notes what a :class:`engine.planning.simulation.Simulation` answers, with the line of the user's code that asked.

    The library's own questions have the usual answer, 0: no gradient is infinite. Checks of torch's distributions find what they check.
    """

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __call__(self, question: str, answer: Any) -> Any:
        """Note it, unless the library has asked; the answer."""
        if type(answer) is bool and _checks_distribution(sys._getframe(1)):
            return True
        place = _asking(sys._getframe(1))
        if place is None:
            return type(answer)(0)
        self._found[f"{place} {question}: the plan continues with {answer}"] = None
        return answer

    def sentences(self) -> tuple[str, ...]:
        """One for each line that asked."""
        return tuple(self._found)

    def leave_out(self, hook: Callable[..., Any], error: Exception) -> None:
        """A hook failed that is no part of the step itself."""
        name = getattr(hook, "__qualname__", None) or getattr(getattr(hook, "func", None), "__qualname__", repr(hook))
        self._found[f"{name} is left out: without values it raises {type(error).__name__}: {error}"] = None

    def explain(self, error: Exception) -> bool:
        """Whether an error of the training comes from values that are not there, or from an answer, and not from the training itself."""
        said = str(error).lower()
        untraceable = (*torch_private.UNREADABLE, torch_private.UNSUPPORTED)
        return isinstance(error, untraceable) or bool(self._found) or any(sign in said for sign in _SIGNS)

    def place(self, error: Exception) -> str:
        """The user's line in an error's traceback, if there is one."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not each.filename.startswith((_TORCH, _OWN, "<"))]
        if not own:
            return "an operation of torch's own"
        last = own[-1]
        return f"{last.filename}:{last.lineno} ({last.line})"


def _checks_distribution(frame: FrameType | None) -> bool:
    """Whether a distribution checks its parameters or values."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PLANNING, "<")):
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def _asking(frame: FrameType | None) -> str | None:
    """The training's line that needs a value, in its own code if another package's reads it; ``None`` if the library asks for itself."""
    others = None
    while frame is not None:
        name = frame.f_code.co_filename
        if zero.PACKAGE in name:  # a norm, and whether it is finite: the library asks through it
            frame = frame.f_back
            continue
        own = name.startswith(_OWN)
        if own and not name.startswith(_PLANNING) and others is None:
            return None
        if not own and not name.startswith((_TORCH, "<")):
            here = f"{name}:{frame.f_lineno} ({linecache.getline(name, frame.f_lineno).strip()})"
            if _PACKAGES not in name:
                return here
            others = others or here
        elif (
            own
            and others is not None
            and not name.startswith(_PLANNING)
            and "training_step" not in frame.f_code.co_name
        ):
            return others
        frame = frame.f_back
    return others


__all__ = ["Answers"]
