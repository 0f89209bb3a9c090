"""Where the seconds of a training epoch go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from engine.loop.result import Times

Batch = TypeVar("Batch")


class EpochClock:
    """Divides an epoch between waiting for data and computing. Validation and checkpoints measure themselves, and belong to neither."""

    __slots__ = ("_apart", "_batch", "_entered", "_times")

    def __init__(self, times: Times) -> None:
        self._times, self._apart = times, times.apart
        self._entered = self._batch = time.perf_counter()

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, the time until each of them counted as waiting."""
        clock, waited = time.perf_counter, 0.0
        asked = clock()
        try:
            for batch in batches:
                self._batch = came = clock()
                waited += came - asked
                yield batch
                asked = clock()
            waited += clock() - asked  # to find that there is none left
        finally:
            self._times.data += waited

    def since_batch(self) -> float:
        """Seconds since the newest batch came."""
        return time.perf_counter() - self._batch

    def stop(self) -> None:
        """The epoch is over, or is left."""
        times = self._times
        times.compute += time.perf_counter() - self._entered - (times.apart - self._apart)
