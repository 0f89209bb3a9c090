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

    __slots__ = ("_apart", "_entered", "_phases", "_times", "previous_s")

    def __init__(self, times: Times, phases: Phases) -> None:
        self._times, self._apart, self._phases = times, times.apart, phases
        self._entered = time.perf_counter()
        self.previous_s = 0.0
        """Seconds from the batch before the current one until the next was asked for; 0 with the first."""

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; counts the time until each of them as waiting, the phase ``data``."""
        clock, times, phases = time.perf_counter, self._times, self._phases
        asked, marked = clock(), _marked()
        for batch in batches:
            if marked is not None:
                marked.__exit__(None, None, None)
            came = clock()
            times.data += came - asked
            for timer in phases.timers:
                timer("data", came - asked)
            yield batch
            del batch  # the next one takes its memory
            asked, marked = clock(), _marked() if profiler._is_profiler_enabled else None
            self.previous_s = asked - came
        if marked is not None:
            marked.__exit__(None, None, None)
        waited = clock() - asked  # until the end of the data
        times.data += waited
        for timer in phases.timers:
            timer("data", waited)

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
