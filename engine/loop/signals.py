"""Ctrl-C and SIGTERM during a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine.distributed.agreement import HURRY, TERMINATE
from engine.loop.run import Run
from engine.utils.errors import TERMINATED
from engine.utils.log import logger


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the step; a second Ctrl-C at once. The user's own handlers stay in place."""
    owner, main = os.getpid(), threading.current_thread() is threading.main_thread()
    pressed = False  # here; `run.interrupted` is true on all ranks after a Ctrl-C on one

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        if os.getpid() != owner:  # a data worker: the run still reads from it until the step ends
            return
        run.interrupted = True
        run.stop("interrupted (Ctrl-C)", HURRY)
        if run.is_main_process:
            logger.warning("Ctrl-C: the run ends after this step; press it again to end at once")

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork of this process, which runs no loop
            os._exit(TERMINATED)
        if run.stop_level < TERMINATE:  # a launcher and a scheduler may both send one
            run.terminated = True
            run.stop("terminated (SIGTERM)", TERMINATE)
            logger.warning("SIGTERM: the run ends after this step, with exit code %d", TERMINATED)

    ours = [(signal.SIGINT, signal.default_int_handler, interrupt), (signal.SIGTERM, signal.SIG_DFL, terminate)]
    taken = [
        (number, before, handler) for number, before, handler in ours if main and signal.getsignal(number) is before
    ]
    for number, _, handler in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before, _ in taken:
            signal.signal(number, before)
