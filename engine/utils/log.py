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
"""All of the library's messages go through this logger: configure it like any other ``logging`` logger."""


TERMINAL = "FIT_TERMINAL"
"""The environment variable by which ``fit launch`` says that it shows its ranks' lines on a terminal: they themselves write into pipes."""


def has_terminal() -> bool:
    """Whether standard error ends at a terminal, of this process or of the ``fit launch`` that reads it."""
    return bool(os.environ.get(TERMINAL)) or (sys.stderr is not None and sys.stderr.isatty())


class TerminalSafe(logging.Filter):
    """Escapes what a terminal would obey in a record's message and traceback: they quote names of users and of files."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the handler reports arguments that do not fit
            return True
        if (safe := terminal_text(message)) != message:
            record.msg, record.args = safe, None
        if record.exc_info and record.exc_text is None:
            text = "".join(traceback.format_exception(*record.exc_info)).removesuffix("\n")
            if (safe := terminal_text(text)) != text:  # else a formatter of the user's own may write it
                record.exc_text = safe
        return True


logger.addFilter(TerminalSafe())
_said: set[str] = set()
_OURS = (*(os.path.join(Path(__file__).parents[2], name, "") for name in ("engine", "callbacks")), contextlib.__file__)


def warn_once(message: str, *, about: CodeType | None = None) -> None:
    """Issue a ``UserWarning`` with this text, once per process, at the innermost line that is not this library's, or at the function ``about``."""
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
    """Shows the library's log on an attached terminal while a run starts, from the block's start to :meth:`close` or its end.

    Only on the main process, and only if the program has not configured logging: where it has, the same lines go there, and nowhere else.

    Args:
        is_main: whether this is the main process.
    """

    def __init__(self, is_main: bool) -> None:
        self._handler: logging.Handler | None = None
        self._wanted = is_main

    def __enter__(self) -> StartLog:
        if self._wanted and has_terminal() and logger.level == logging.NOTSET and not logger.hasHandlers():
            self._handler = logging.StreamHandler()
            self._handler.addFilter(lambda record: not logging.getLogger().handlers)  # configured meanwhile
            logger.addHandler(self._handler)
            logger.setLevel(logging.INFO)
        return self

    def close(self) -> None:
        """The run has started, or failed."""
        if self._handler is not None:
            logger.removeHandler(self._handler)
            logger.setLevel(logging.NOTSET)
            self._handler = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
