"""Measures the time of a training epoch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch.autograd import profiler

from engine.loop.phases import Phase, Phases
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
        asked = clock()
        phase = _entered(phases) if profiler._is_profiler_enabled or phases.timers else None
        for batch in batches:
            if phase is not None:
                phase.__exit__()
            self._batch = came = clock()
            times.data += came - asked
            yield batch
            asked = clock()
            phase = _entered(phases) if profiler._is_profiler_enabled or phases.timers else None
        if phase is not None:
            phase.__exit__()
        times.data += clock() - asked  # until the end of the data

    def since_batch(self) -> float:
        """Seconds since the latest batch."""
        return time.perf_counter() - self._batch

    def stop(self) -> None:
        """End the epoch."""
        times = self._times
        times.compute += time.perf_counter() - self._entered - (times.apart - self._apart)


def _entered(phases: Phases) -> Phase:
    """The phase of waiting for a batch, from now on."""
    phase = phases.of("data")
    phase.__enter__()
    return phase
