"""Loggers that know the ranks."""

from __future__ import annotations

import functools
import logging
from typing import Any

from engine.interop.accelerate.state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logs on the main process; ``main_process_only=False``: on each, ``in_order=True``: one after the other."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        state = PartialState()
        everywhere, in_order = not kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        for rank in range(state.num_processes) if in_order else [state.process_index]:
            if state.process_index == rank and (everywhere or in_order or state.is_main_process):
                self.logger.log(level, msg, *args, **kwargs)
            if in_order:
                state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that appears once."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger of this name, which logs on the main process only, by default."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
