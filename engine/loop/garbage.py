"""Python's garbage collector, called between steps instead of at any time: at the same steps on all ranks, so that none waits for another."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

FULL = 10
"""Every this many collections also traverse objects that have survived earlier ones."""
EVERYTHING_S = 60.0
"""Seconds of training after which a collection traverses everything: it takes 0.1 to 0.2 s after ``import torch``."""

_off = False  # by a Collector of this process
_unseen_s = 0.0  # seconds of training in this process since a collection has traversed everything


class Collector:
    """Collects when :meth:`collect` is called, and never by itself between :meth:`begin` and :meth:`end`.

    The first collection traverses what is young and freezes all objects, so that later ones traverse only new ones: some microseconds. What was
    garbage before is found after a minute of training, which may be that of several runs in this process. If the caller has switched the
    collector off, it stays off.
    """

    def __init__(self) -> None:
        self._ours = self._frozen = False
        self._count = 0
        self._trained_s = 0.0

    def begin(self, trained_s: float = 0.0) -> None:
        """Switch automatic collection off. ``trained_s``: as in :meth:`collect`, at the start."""
        global _off
        self._trained_s = trained_s
        self._ours = gc.isenabled()
        if self._ours:
            gc.disable()
            _off = True

    def collect(self, trained_s: float = 0.0) -> None:
        """Collect now. Call it on all ranks at the same step.

        Args:
            trained_s: seconds of training so far, the same on all ranks.
        """
        global _unseen_s
        if not self._ours:
            return
        self._count += 1
        self._count_time(trained_s)
        everything = _unseen_s >= EVERYTHING_S
        if everything:
            _unseen_s = 0.0
            self._thaw()
        gc.collect(2 if everything or self._count % FULL == 0 else 1)
        if (
            everything or self._count == 1
        ) and not gc.get_freeze_count():  # thawing would also thaw what the caller has frozen
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
        """Inside the block Python collects automatically (evaluation, which has no steps)."""
        if self._ours:
            gc.enable()
        try:
            yield
        finally:
            if self._ours:
                gc.disable()

    def end(self, trained_s: float = 0.0) -> None:
        """Restore everything as it was at :meth:`begin`. ``trained_s``: as in :meth:`collect`."""
        global _off
        self._thaw()
        if self._ours:
            self._count_time(trained_s)
            gc.enable()
            _off = False
        self._ours = False
        self._count = 0


def _in_child() -> None:
    if _off:  # a DataLoader's worker has no steps at which to collect
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
