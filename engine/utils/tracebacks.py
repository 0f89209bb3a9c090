"""Trims tracebacks to the user's frames, without this library's and torch's on the way to them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_PACKAGE = Path(__file__).resolve().parents[1]
_OURS = (f"{_PACKAGE}{os.sep}", f"{_PACKAGE.parent / 'callbacks'}{os.sep}")
_INSTALLED = tuple(
    f"{place}{os.sep}"
    for place in {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        # A virtual environment may take packages of another one, of the system or of the user.
        *(place for place in sys.path if place.endswith(("site-packages", "dist-packages"))),
    }
)
_NEUTRAL = (
    "<frozen importlib",
    "<frozen runpy>",
    contextlib.__file__,
    importlib.__file__,
    f"{os.sep}jsonargparse{os.sep}",
)
"""Parts of file names: frames of libraries between our code and the user's."""
_TORCH = tuple(f"{place}torch{os.sep}" for place in _INSTALLED)
_NN, _FAKE = (f"{os.sep}torch{os.sep}{part}{os.sep}" for part in ("nn", "_subclasses"))


def is_ours_alone(error: BaseException) -> bool:
    """Whether all frames of an error's traceback are this library's: none is the user's, or a library's that the user called."""
    return all(_is_ours(frame) or _is_neutral(frame) for frame in _frames(error.__traceback__))


def trim(error: BaseException) -> None:
    """Remove this library's frames from the tracebacks of an exception and its causes, unless no others remain. ``python -X dev`` keeps them."""
    if sys.flags.dev_mode:
        return
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        frames = [frame for frame in _frames(current.__traceback__) if not _is_neutral(frame)]
        remaining = _without_what_we_called(frames) or [frame for frame in frames if not _is_ours(frame)]
        remaining = _until_shapes(remaining) or remaining
        if remaining or isinstance(current, SyntaxError):  # a SyntaxError shows its own position, and needs no frames
            current.__traceback__ = _linked(remaining)
        pending += [current.__cause__, current.__context__]


def _without_what_we_called(frames: list[TracebackType]) -> list[TracebackType]:
    """The frames without ours, and without those of installed packages between one of ours and the user's next one."""
    remaining: list[TracebackType] = []
    from_ours = True
    for frame in frames:
        if _is_ours(frame):
            from_ours = True
        elif not (from_ours and _is_installed(frame)):
            from_ours = False
            remaining.append(frame)
    return remaining


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames."""
    below: TracebackType | None = None
    for frame in reversed(frames):
        below = TracebackType(below, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return below


def _is_ours(trace: TracebackType) -> bool:
    if _file(trace) == "<string>":  # the __init__ of a dataclass
        return str(trace.tb_frame.f_globals.get("__name__")).startswith(("engine.", "callbacks."))
    return os.path.abspath(_file(trace)).startswith(_OURS)


def _is_installed(trace: TracebackType) -> bool:
    return _file(trace).startswith(_INSTALLED)


def _is_neutral(trace: TracebackType) -> bool:
    return any(part in _file(trace) for part in _NEUTRAL)


def _until_shapes(frames: list[TracebackType]) -> list[TracebackType]:
    """The frames without those in which torch infers shapes of tensors without values: they only show how a plan works."""
    end = next((index for index, frame in enumerate(frames) if _FAKE in _file(frame)), len(frames))
    while 0 < end < len(frames) and _file(frames[end - 1]).startswith(_TORCH) and _NN not in _file(frames[end - 1]):
        end -= 1  # the dispatcher's frames before them
    return frames[:end]


def _file(trace: TracebackType) -> str:
    return traceback.extract_tb(trace, limit=1)[0].filename
