"""Shows errors in the terminal: one line for what the user can fix, and the user's traceback for exceptions of the user's code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from engine.cli.terminal import FAILED, INTERRUPTED, USAGE, UsageError, complain
from engine.distributed import failures
from engine.distributed.environments import detect
from engine.utils import tracebacks
from engine.utils.errors import RankError
from engine.utils.text import terminal_text

_ABOUT_INPUT = (ValueError, TypeError, ImportError, FileNotFoundError)
"""Exceptions that the library's own checks raise for wrong values."""
_ABOUT_FAILURE = (RuntimeError, OSError, FloatingPointError)
"""Exceptions that the library's own code raises for failures, with a complete message."""


def run_reporting_errors(work: Callable[[], int]) -> int:
    """Call ``work`` and return its exit status. An exception is shown, recorded where the launcher looks for it, and turned into a status.

    ======================================  ===================================  ==========
    what was raised                         what is shown                        status
    ======================================  ===================================  ==========
    by our checks, about a value given      one line                             2
    by our code, about what happened        one line                             1
    by anybody else's code                  the traceback without our frames     1
    ``KeyboardInterrupt``                   the line that the run gave it        130
    ``SystemExit``                          raised on
    ======================================  ===================================  ==========

    ``python -X dev`` shows every traceback in full.
    """
    try:
        failures.attach(detect(os.environ))
        return work()
    except KeyboardInterrupt as error:
        _remember(error)
        if detect(os.environ).rank == 0:
            print(terminal_text(error) or "interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except BrokenPipeError as error:
        _remember(error)
        raise
    except UsageError as error:
        _remember(error)
        return _show(error, USAGE)
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Show an exception: one line if the library raised it, else the traceback. Return the exit status."""
    _remember(error)
    is_ours = isinstance(error, RankError) or tracebacks.is_ours_alone(error)
    if is_ours and isinstance(error, (*_ABOUT_INPUT, *_ABOUT_FAILURE)) and not sys.flags.dev_mode:
        return _show(error, USAGE if isinstance(error, _ABOUT_INPUT) else FAILED)
    if not is_ours or isinstance(error, SyntaxError):
        tracebacks.trim(error)
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)  # which also records it, see failures.attach
    return FAILED


def _remember(error: BaseException) -> None:
    """Store the exception in ``sys.last_exc``, as the interpreter does for an uncaught one: exit handlers read it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined, unused-ignore]


def _show(error: Exception, status: int) -> int:
    """Show an error whose message is complete, here or where the launcher looks for it. Return ``status``."""
    with contextlib.suppress(RuntimeError):
        environment = detect(os.environ)
        if environment.error_file:
            failures.record(error, Path(environment.error_file))
        if failures.is_shown_by_rank_0(environment):
            return status
    complain(error)
    return status
