"""Python's garbage collector, called between steps instead of at any time: at the same steps on all ranks, so that none waits for another."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

FULL = 10
"""Every this many collections also traverse objects that have survived earlier ones."""

_off = False  # by a Collector of this process


class Collector:
    """Collects when :meth:`collect` is called, and never by itself between :meth:`begin` and :meth:`end`.

    The first collection traverses everything (0.1 s after ``import torch``) and freezes what survives, so that later ones traverse only
    new objects: some microseconds. If the caller has switched the collector off, it stays off.
    """

    def __init__(self) -> None:
        self._ours = self._frozen = False
        self._count = 0

    def begin(self) -> None:
        """Switch automatic collection off."""
        global _off
        self._ours = gc.isenabled()
        if self._ours:
            gc.disable()
            _off = True

    def collect(self) -> None:
        """Collect now. Call it on all ranks at the same step."""
        if not self._ours:
            return
        self._count += 1
        if self._count == 1:
            gc.collect()
            self._frozen = not gc.get_freeze_count()  # unfreezing would also unfreeze the caller's
            if self._frozen:
                gc.freeze()
        else:
            gc.collect(2 if self._count % FULL == 0 else 1)

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

    def end(self) -> None:
        """Restore everything as it was at :meth:`begin`."""
        global _off
        if self._frozen:
            gc.unfreeze()
        if self._ours:
            gc.enable()
            _off = False
        self._ours = self._frozen = False
        self._count = 0


def _in_child() -> None:
    if _off:  # a DataLoader's worker has no steps at which to collect
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
