"""When Python collects garbage: between steps, at the same steps on all ranks, so that no rank waits for another one's collection; not at exit."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FULL = 10
"""Every how many collections one also traverses objects that have survived earlier collections."""
EVERYTHING_S = 60.0
"""Seconds of training after which a collection traverses frozen objects too, which takes 0.1 to 0.2 s after ``import torch``."""

_switched_off = False  # whether a Collector of this process has switched automatic collection off
_unseen_s = 0.0  # seconds of training in this process since the latest collection of everything
_switch = threading.Lock()  # held by a thread that switches automatic collection, or relies on its being off


class Collector:
    """Collects garbage only when :meth:`collect` is called: between :meth:`begin` and :meth:`end` there is no automatic collection.

    The first collection traverses young objects and freezes all objects, so that later collections traverse only newer ones, which takes some
    microseconds. Garbage that was frozen is found after a minute of training, counted over all runs in this process. If the caller has switched
    the garbage collector off, it stays off, and :meth:`collect` does nothing.
    """

    def __init__(self) -> None:
        self._is_active = self._frozen = False
        self._count = 0
        self._trained_s = 0.0

    def begin(self, trained_s: float = 0.0) -> None:
        """Switch automatic collection off. ``trained_s``: as in :meth:`collect`, at the start."""
        global _switched_off
        self._trained_s = trained_s
        with _switch:
            self._is_active = gc.isenabled()
            if self._is_active:
                gc.disable()
                _switched_off = True

    def collect(self, trained_s: float = 0.0) -> None:
        """Collect now. Call it on all ranks at the same step.

        Args:
            trained_s: seconds of training so far, including those before a resume; the same on all ranks.
        """
        global _unseen_s
        if not self._is_active:
            return
        self._count += 1
        self._count_time(trained_s)
        everything = _unseen_s >= EVERYTHING_S
        if everything:
            _unseen_s = 0.0
            self._thaw()
        gc.collect(2 if everything or self._count % FULL == 0 else 1)
        # Objects that the caller has frozen would be thawed with ours: then freeze none.
        if (everything or self._count == 1) and not gc.get_freeze_count():
            gc.freeze()
            self._frozen = True

    def _count_time(self, trained_s: float) -> None:
        global _unseen_s
        _unseen_s += max(0.0, trained_s - self._trained_s)
        self._trained_s = trained_s

    def _thaw(self) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    @contextmanager
    def automatic(self) -> Iterator[None]:
        """Inside the block, Python collects automatically; for evaluations, which do not call :meth:`collect`."""
        if self._is_active:
            with _switch:
                gc.enable()
        try:
            yield
        finally:
            if self._is_active:
                with _switch:
                    gc.disable()

    def end(self, trained_s: float = 0.0) -> None:
        """Restore Python's collector as it was at :meth:`begin`. ``trained_s``: as in :meth:`collect`."""
        global _switched_off
        self._thaw()
        if self._is_active:
            self._count_time(trained_s)
            with _switch:
                gc.enable()
                _switched_off = False
        self._is_active = False
        self._count = 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch automatic collection off inside the block, which creates many objects that stay: Python would traverse all objects again and again."""
    with _switch:
        automatic = gc.isenabled()
        gc.disable()
    try:
        yield
    finally:
        if automatic:
            with _switch:
                gc.enable()


@contextmanager
def postponed() -> Iterator[None]:
    """Let no object that this thread creates inside the block start a collection, whatever other threads of this library do. For short blocks."""
    global _switched_off
    with _switch:
        automatic, switched_off = gc.isenabled(), _switched_off
        if automatic:
            gc.disable()
            _switched_off = True  # for a process that another thread forks now
        try:
            yield
        finally:
            if automatic:
                gc.enable()
                _switched_off = switched_off


def collect_none_at_exit() -> None:
    """Let the interpreter, which is about to exit, leave out its last collection of garbage: it takes 0.3 s or more after ``import torch``.

    Everything else happens as usual: exit handlers, the teardown of modules, and the exit status (which ``os._exit`` would have to be told).
    Files in reference cycles are not closed, so their buffers are flushed now.
    """
    for item in gc.get_objects():
        if type(item) in _BUFFERED:
            with suppress(OSError, ValueError):  # ignored as in a destructor; ValueError: the file is closed
                item.flush()
    gc.disable()
    gc.freeze()


_BUFFERED = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair}


def _after_fork_in_child() -> None:
    global _switch
    _switch = threading.Lock()  # the thread that held it is not in this process
    if _switched_off:  # nothing calls collect() in a forked process, such as a DataLoader's worker
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
