"""Threads beside a program's own: an error in one is logged once, with what it means."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.utils.log import logger


class HelperThread(threading.Thread):
    """A daemon thread that logs the error that ends it. Python would print it among other output, and nothing at all for a ``SystemExit``.

    Args:
        target: the function that the thread calls.
        name: the thread's name.
        consequence: what the program is without from then on, for the message.
    """

    def __init__(self, target: Callable[[], None], name: str, consequence: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.consequence = consequence

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:
            log_failure(self.name, self.consequence, error)


def log_failure(name: str, consequence: str, error: BaseException) -> None:
    """Log that the thread called ``name`` has failed with ``error``, and the ``consequence``."""
    logger.error(
        "the thread %s has failed with %s: %s; %s", name, type(error).__name__, error, consequence, exc_info=error
    )
