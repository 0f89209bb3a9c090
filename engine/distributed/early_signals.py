"""SIGTERM, seen while the main thread is in native code, where Python's handlers do not run before the call returns."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

_writing_end = -1  # of the pipe that is installed in this process


class EarlySignals:
    """Sees SIGTERM from any thread. A rank that waits in a collective runs Python's handler only afterwards, which may be never.

    Inside the block the interpreter writes the number of each signal into a pipe at once, and :attr:`terminated` reads it. A pipe that the program
    has installed (``signal.set_wakeup_fd``, as asyncio does) stays; then only :meth:`note` tells.
    """

    def __init__(self) -> None:
        self._terminated = False
        self._reading_end = -1

    def note(self) -> None:
        """Note that the handler for SIGTERM has run."""
        self._terminated = True

    @property
    def terminated(self) -> bool:
        """Whether this process has got SIGTERM in the block."""
        if not self._terminated and self._reading_end >= 0:
            with suppress(BlockingIOError, OSError):
                self._terminated = signal.SIGTERM in os.read(self._reading_end, 4096)
        return self._terminated

    def __enter__(self) -> EarlySignals:
        global _writing_end
        if threading.current_thread() is not threading.main_thread() or _writing_end >= 0:
            return self
        reading_end, writing_end = os.pipe()
        for descriptor in (reading_end, writing_end):
            os.set_blocking(descriptor, False)
        before = signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
        if before >= 0:
            signal.set_wakeup_fd(before)
            os.close(reading_end)
            os.close(writing_end)
        else:
            self._reading_end, _writing_end = reading_end, writing_end
        return self

    def __exit__(self, *error: object) -> None:
        global _writing_end
        if self._reading_end < 0:
            return
        if (current := signal.set_wakeup_fd(-1)) != _writing_end and current >= 0:
            signal.set_wakeup_fd(current)  # the program has installed its own meanwhile
        reading_end, self._reading_end = self._reading_end, -1
        os.close(reading_end)
        os.close(_writing_end)
        _writing_end = -1


def _forget_in_child() -> None:
    """Leave the pipe to the parent, in a forked process such as a data worker: its signals are not the parent's."""
    global _writing_end
    if _writing_end >= 0:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
        _writing_end = -1


os.register_at_fork(after_in_child=_forget_in_child)
