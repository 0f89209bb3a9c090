"""The library's logger, and warnings that appear once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from types import CodeType, TracebackType

from engine.utils.text import terminal_text

logger = logging.getLogger("engine")
"""The logger of all of the library's messages; configure it like any other ``logging`` logger."""


TERMINAL = "FIT_TERMINAL"
"""The environment variable by which ``fit launch`` tells its ranks, which write into pipes, that it shows their lines on a terminal."""


def has_terminal() -> bool:
    """Whether standard error is shown on a terminal, by this process or by the ``fit launch`` that reads its output."""
    return bool(os.environ.get(TERMINAL)) or (sys.stderr is not None and sys.stderr.isatty())


class TerminalSafe(logging.Filter):
    """Escapes control characters in a record's message and traceback, which quote text of users and of files."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the handler reports arguments that do not fit
            return True
        if (safe := terminal_text(message)) != message:
            record.msg, record.args = safe, None
        if record.exc_info and record.exc_text is None:
            text = "".join(traceback.format_exception(*record.exc_info)).removesuffix("\n")
            if (safe := terminal_text(text)) != text:  # safe tracebacks are left to the user's formatter
                record.exc_text = safe
        return True


logger.addFilter(TerminalSafe())
_said: set[str] = set()
_OURS = (*(os.path.join(Path(__file__).parents[2], name, "") for name in ("engine", "callbacks")), contextlib.__file__)


def warn_once(message: str, *, about: CodeType | None = None) -> None:
    """Issue a ``UserWarning`` once per process. Its place is the innermost line outside this library, or the function ``about``."""
    if message in _said:
        return
    _said.add(message)
    if about is not None:
        warnings.warn_explicit(terminal_text(message), UserWarning, about.co_filename, about.co_firstlineno)
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(terminal_text(message), UserWarning, stacklevel=level)


class StartLog:
    """Shows the library's log on the terminal while a run starts: inside the block, until :meth:`close`.

    This happens only in the main process, and only if the program has not configured logging; if it has, that decides where the lines go.

    Args:
        is_main: whether this is the main process.
    """

    def __init__(self, is_main: bool) -> None:
        self._handler: logging.Handler | None = None
        self._is_main = is_main

    def __enter__(self) -> StartLog:
        if self._is_main and has_terminal() and logger.level == logging.NOTSET and not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            # Silent once the program configures logging.
            self._handler.addFilter(lambda record: not logging.getLogger().handlers)
            logger.addHandler(self._handler)
            logger.setLevel(logging.INFO)
        return self

    def close(self) -> None:
        """Stop showing the log, because the run has started or failed."""
        if self._handler is not None:
            logger.removeHandler(self._handler)
            logger.setLevel(logging.NOTSET)
            self._handler = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
