"""Measures the time of a training epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from engine.loop.result import Times

Batch = TypeVar("Batch")


class EpochClock:
    """Divides an epoch into waiting for data and computing. Validation and checkpoints are measured separately."""

    __slots__ = ("_apart", "_batch", "_entered", "_times")

    def __init__(self, times: Times) -> None:
        self._times, self._apart = times, times.apart
        self._entered = self._batch = time.perf_counter()

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; counts the time until each of them as waiting."""
        clock, waited = time.perf_counter, 0.0
        asked = clock()
        try:
            for batch in batches:
                self._batch = came = clock()
                waited += came - asked
                yield batch
                asked = clock()
            waited += clock() - asked  # until the end of the data
        finally:
            self._times.data += waited

    def since_batch(self) -> float:
        """Seconds since the latest batch."""
        return time.perf_counter() - self._batch

    def stop(self) -> None:
        """End the epoch."""
        times = self._times
        times.compute += time.perf_counter() - self._entered - (times.apart - self._apart)
