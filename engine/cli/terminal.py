"""The terminal of ``fit``: exit statuses, the error for what the caller can fix, and printing. Imports no torch."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine.utils.errors import INTERRUPTED
from engine.utils.text import terminal_text

OK = 0
FAILED = 1
"""The run failed, or a check did."""
USAGE = 2
"""Wrong options, settings or targets: nothing was started."""
DOES_NOT_FIT = 3
"""``fit plan`` forecasts that a rank needs more memory than its device has."""

STATUSES = """\
exit status:
  0    success
  1    an error of the run, or a check that failed
  2    wrong usage: an unknown option or setting, a bad configuration or target
  3    fit plan: a rank needs more memory than its device has
  130  Ctrl-C; a run has finished its step and saved its checkpoint
  143  SIGTERM; likewise"""
"""The text for ``--help``."""


class UsageError(Exception):
    """The caller gave something wrong; the message says what it is and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose error messages escape the words that they quote: the shell may have replaced a ``*`` by the names of files."""

    def error(self, message: str) -> NoReturn:
        super().error(terminal_text(message, one_line=True))

    def check(self, options: argparse.Namespace) -> None:
        """Raise an error for options that do not go together. Called before the command's module is imported, so that errors come at once.

        The parsers of :mod:`engine.cli.options` override this: ``TargetParser``, ``RunParser``, ``PlanParser`` and ``LaunchParser``.
        """


def open_streams() -> None:
    """Connect standard streams that were closed before the start (``>&-``) to the null device, so that the next file that is opened does not take
    their place.

    Characters that the encoding of standard output lacks are written as Python's escapes, as on standard error.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def guarded(command: Callable[[], int]) -> int:
    """Run ``command`` and return its exit status: for a :class:`UsageError`, which is printed as one line, 2; for Ctrl-C 130."""
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
    except BrokenPipeError:
        # The reader of our output has closed it: leave nothing for the interpreter to write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def complain(error: object) -> None:
    """Print ``fit: error: ...`` on stderr."""
    sys.stdout.flush()
    print(terminal_text(f"fit: error: {error}"), file=sys.stderr, flush=True)


def show(*lines: object) -> None:
    """Print lines that may contain foreign text: nothing in them controls the terminal."""
    print(*map(terminal_text, lines), sep="\n", flush=True)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format rows as lines with aligned columns. A column is at most 60 wide: longer cells shift only the rest of their row."""
    widths = [min(max(map(len, column)), 60) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
