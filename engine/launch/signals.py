"""Signals that the launcher handles while its ranks run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence

from torch.distributed.elastic.multiprocessing import SignalException

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that reach the ranks through the agent."""


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Inside the block signals raise :class:`SignalException`; afterwards the previous handlers are restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*HANDLED, signal.SIGQUIT)}
    # nohup ignores SIGHUP. A script's background jobs ignore Ctrl-C, but if it is sent to them, it is meant.
    handle_signals([number for number in HANDLED if number != signal.SIGHUP or before[number] != signal.SIG_IGN])
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handle_signals(numbers: Sequence[signal.Signals]) -> None:
    """From now on these raise :class:`SignalException`; other signals that torch's agent handles get their default handlers."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: object) -> None:
        raise SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))

    for number in HANDLED:
        signal.signal(number, handle if number in numbers else signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
