"""The exit statuses of ``fit``, and the error that is the caller's to mend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

OK = 0
FAILED = 1
"""The run, or something that was checked, failed."""
USAGE = 2
"""Wrong options, settings or targets: nothing was started."""
INTERRUPTED = 130
"""Ctrl-C, as shells show it."""

STATUSES = """\
exit status:
  0    all went well
  1    an error of the run, or a check that failed
  2    wrong usage: an unknown option or setting, a bad configuration or target
  130  Ctrl-C; a run has ended its step and saved its checkpoint
  143  SIGTERM; likewise"""
"""For people."""


class UsageError(Exception):
    """Something that the caller has given cannot be right; the message says what, and what to do."""


def open_streams() -> None:
    """Standard streams that were closed before this process started (``>&-``) lead nowhere, instead of to the next file that is opened."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def guarded(command: Callable[[], int]) -> int:
    """Run ``command``; a :class:`UsageError` becomes one line and status 2, Ctrl-C status 130."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except UsageError as error:
        complain(error)
        return USAGE
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # who reads our output has seen enough; nothing may be left for the interpreter to write at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def complain(error: object) -> None:
    """``fit: error: ...`` on stderr."""
    sys.stdout.flush()
    print(f"fit: error: {error}", file=sys.stderr, flush=True)
