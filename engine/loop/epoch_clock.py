"""Measures the time of a training epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch.autograd import profiler

from engine.loop.phases import Phases
from engine.loop.result import Times

Batch = TypeVar("Batch")


class EpochClock:
    """Divides an epoch into waiting for data and computing. Validation and checkpoints are measured separately."""

    __slots__ = ("_apart", "_batch", "_entered", "_phases", "_times")

    def __init__(self, times: Times, phases: Phases) -> None:
        self._times, self._apart, self._phases = times, times.apart, phases
        self._entered = self._batch = time.perf_counter()

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; counts the time until each of them as waiting, the phase ``data``."""
        clock, times, phases = time.perf_counter, self._times, self._phases
        asked, marked = clock(), _marked()
        for batch in batches:
            if marked is not None:
                marked.__exit__(None, None, None)
            self._batch = came = clock()
            times.data += came - asked
            for timer in phases.timers:
                timer("data", came - asked)
            yield batch
            asked, marked = clock(), _marked() if profiler._is_profiler_enabled else None
        if marked is not None:
            marked.__exit__(None, None, None)
        waited = clock() - asked  # until the end of the data
        times.data += waited
        for timer in phases.timers:
            timer("data", waited)

    def since_batch(self) -> float:
        """Seconds since the latest batch."""
        return time.perf_counter() - self._batch

    def stop(self) -> None:
        """End the epoch."""
        times = self._times
        times.compute += time.perf_counter() - self._entered - (times.apart - self._apart)


def _marked() -> profiler.record_function | None:
    """A range ``data`` from now on, if a profiler runs."""
    if not profiler._is_profiler_enabled:
        return None
    marked = profiler.record_function("data")
    marked.__enter__()
    return marked
