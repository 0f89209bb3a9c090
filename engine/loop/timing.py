"""The phases of a run for profilers, the intervals at which something is due, and the times of a training epoch.

Phases are called ``data``, ``forward``, ``backward``, ``optimizer``, ``validation``, ``checkpoint``, ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

from torch.autograd import profiler

from engine.config.duration import Every
from engine.config.settings import Settings
from engine.loop.state import Times

Timer = Callable[[str, float], None]
"""A function that is called at the end of each phase with its name and its duration in seconds: a method of :class:`callbacks.SimpleProfiler`,
``ThroughputMonitor`` or ``StragglerMonitor``, or a user's function."""


class Phases:
    """Reports the phases of a run: to torch's profiler, as ranges with the phases' names, and to ``timers``.

    The loop checks before each phase whether there is a profiler or a timer (``profiler._is_profiler_enabled or phases.timers``: two attribute
    reads, 30 ns), and only then runs the phase through :meth:`named`. Any torch profiler sees the ranges, also one that the user started around
    ``fit.run``.
    """

    __slots__ = ("timers",)

    def __init__(self) -> None:
        self.timers: tuple[Timer, ...] = ()
        """The timers; add one with ``phases.timers += (timer,)``. They get times of the host: a device may still compute when a phase ends."""

    def timed(self, name: str) -> Phase:
        """Return a context that is the phase ``name``."""
        return Phase(name, self)

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function``, so that it runs as the phase ``name``; return ``function`` itself if there is no profiler and no timer."""
        if not (profiler._is_profiler_enabled or self.timers):
            return function
        return partial(self._call, name, function)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if profiler._is_profiler_enabled:
            with Phase(name, self):
                return function(*args, **kwargs)
        began = time.perf_counter()
        result = function(*args, **kwargs)
        elapsed_s = time.perf_counter() - began
        for timer in self.timers:
            timer(name, elapsed_s)
        return result


class Phase:
    """A context that reports its block as a phase."""

    __slots__ = ("_began", "_name", "_phases", "_range")

    def __init__(self, name: str, phases: Phases) -> None:
        self._name, self._phases = name, phases

    def __enter__(self) -> None:
        self._range = profiler.record_function(self._name) if profiler._is_profiler_enabled else None
        if self._range is not None:
            self._range.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        elapsed_s = time.perf_counter() - self._began
        if self._range is not None:
            self._range.__exit__(None, None, None)
        for timer in self._phases.timers:
            timer(self._name, elapsed_s)


@contextmanager
def checkpoint_phase(phases: Phases, times: Times) -> Iterator[None]:
    """Inside the block, the phase is ``checkpoint``; its time is added to ``times.checkpoint``."""
    began = time.perf_counter()
    with phases.timed("checkpoint"):
        yield
    times.checkpoint += time.perf_counter() - began


Batch = TypeVar("Batch")


class Intervals:
    """The intervals at which validation, publishing and garbage collection are due, from the settings."""

    def __init__(self, settings: Settings) -> None:
        self.validation = Every(settings.val_every)
        self.publishing = Every(settings.log_every_n_steps or None)
        self.garbage = Every(settings.gc_every_n_steps or None)

    def start(self, step: int, epochs: Fraction | None) -> None:
        """Start or continue the intervals at ``step``, after this number of ``epochs``."""
        self.validation.start(step, epochs)
        self.publishing.start(step)
        self.garbage.start(step)


class EpochClock:
    """Divides the time of an epoch into waiting for data and computing. Validation and checkpoints are measured elsewhere, and subtracted."""

    __slots__ = ("_apart", "_entered", "_phases", "_times", "previous_s")

    def __init__(self, times: Times, phases: Phases) -> None:
        self._times, self._apart, self._phases = times, times.apart, phases
        self._entered = time.perf_counter()
        self.previous_s = 0.0
        """Seconds that the loop took for the batch before the current one, without waiting for data; 0 at the first batch."""

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time until each arrives as waiting for data (the phase ``data``)."""
        clock, times, phases = time.perf_counter, self._times, self._phases
        requested, data_range = clock(), _data_range()
        for batch in batches:
            if data_range is not None:
                data_range.__exit__(None, None, None)
            arrived = clock()
            times.data += arrived - requested
            for timer in phases.timers:
                timer("data", arrived - requested)
            yield batch
            del batch  # frees its memory for the next batch
            requested, data_range = clock(), _data_range() if profiler._is_profiler_enabled else None
            self.previous_s = requested - arrived
        if data_range is not None:
            data_range.__exit__(None, None, None)
        waited = clock() - requested  # for the end of the data
        times.data += waited
        for timer in phases.timers:
            timer("data", waited)

    def stop(self) -> None:
        """End the epoch: count its time that was not measured elsewhere as computing."""
        times = self._times
        times.compute += time.perf_counter() - self._entered - (times.apart - self._apart)


def _data_range() -> profiler.record_function | None:
    """Open a range ``data`` for torch's profiler, if one is active."""
    if not profiler._is_profiler_enabled:
        return None
    data_range = profiler.record_function("data")
    data_range.__enter__()
    return data_range
