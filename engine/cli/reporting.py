"""How errors are shown in the terminal: one line for what the user can fix, the user's traceback for exceptions of their code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from engine.cli.exits import FAILED, USAGE, UsageError, complain
from engine.distributed import failures
from engine.distributed.environment import detect
from engine.utils.errors import RankError

_PACKAGE = Path(__file__).resolve().parents[1]
_OURS = (f"{_PACKAGE}{os.sep}", f"{_PACKAGE.parent / 'callbacks'}{os.sep}")
_INSTALLED = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
_NEUTRAL = (
    "<frozen importlib",
    "<frozen runpy>",
    contextlib.__file__,
    importlib.__file__,
    f"{os.sep}jsonargparse{os.sep}",
)
"""Frames of libraries between our code and the user's."""
_TORCH = tuple(f"{place}torch{os.sep}" for place in _INSTALLED)
_NN, _FAKE = (f"{os.sep}torch{os.sep}{part}{os.sep}" for part in ("nn", "_subclasses"))
_MENDABLE = (ValueError, TypeError, ImportError, FileNotFoundError)
"""Exceptions of our own checks about values they were given."""
_TOLD = (RuntimeError, OSError, FloatingPointError)
"""Exceptions of our own code about failures, with a complete message."""


def reported(work: Callable[[], int]) -> int:
    """The exit status of ``work``; an exception is shown, and written where the launcher looks for it.

    ======================================  ===================================  ==========
    what was raised                         what is shown                        status
    ======================================  ===================================  ==========
    by our checks, about a value given      one line                             2
    by our code, about what happened        one line                             1
    by anybody else's code                  the traceback without our frames     1
    ``KeyboardInterrupt``, ``SystemExit``   raised on
    ======================================  ===================================  ==========

    ``python -X dev`` shows every traceback in full.
    """
    try:
        failures.attach(detect(os.environ))
        return work()
    except (KeyboardInterrupt, BrokenPipeError) as error:
        _remember(error)
        raise
    except UsageError as error:
        _record(error)
        _remember(error)
        raise
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    _remember(error)
    ours = isinstance(error, RankError) or all(
        _is_ours(frame) or _is_neutral(frame) for frame in _frames(error.__traceback__)
    )
    if ours and isinstance(error, (*_MENDABLE, *_TOLD)) and not sys.flags.dev_mode:
        _record(error)
        complain(error)
        return USAGE if isinstance(error, _MENDABLE) else FAILED
    if (not ours or isinstance(error, SyntaxError)) and not sys.flags.dev_mode:
        _trim(error)
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)  # which also records it, see failures.attach
    return FAILED


def _remember(error: BaseException) -> None:
    """As the interpreter does for an uncaught exception: exit handlers check how the program has ended."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined, unused-ignore]


def _record(error: Exception) -> None:
    with contextlib.suppress(RuntimeError):
        if file := detect(os.environ).error_file:
            failures.record(error, Path(file))


def _trim(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of its causes, if any others remain."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kept = [frame for frame in _frames(each.__traceback__) if not _is_ours(frame) and not _is_neutral(frame)]
        first = next((index for index, frame in enumerate(kept) if not _is_installed(frame)), 0)
        kept = kept[first:]  # torch's frames from our call to the first line of the user's code
        kept = _until_shapes(kept) or kept
        if kept or isinstance(each, SyntaxError):  # which shows its own position
            each.__traceback__ = _joined(kept)
        pending += [each.__cause__, each.__context__]


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _joined(frames: list[TracebackType]) -> TracebackType | None:
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
    """Without those in which torch computes the shape of a result that has no values: they only say how a plan works."""
    end = next((index for index, frame in enumerate(frames) if _FAKE in _file(frame)), len(frames))
    while 0 < end < len(frames) and _file(frames[end - 1]).startswith(_TORCH) and _NN not in _file(frames[end - 1]):
        end -= 1  # the dispatcher's, before them
    return frames[:end]


def _file(trace: TracebackType) -> str:
    return traceback.extract_tb(trace, limit=1)[0].filename
