"""The phases of a run, by name, for profilers; its intervals; and the times of a training epoch.

Names: ``data``, ``forward``, ``backward``, ``optimizer``, ``validation``, ``checkpoint`` and others.
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
"""Called at the end of each phase with its name and how long it was (s): methods of :class:`callbacks.SimpleProfiler`, ``ThroughputMonitor`` and
``StragglerMonitor``, or a user's."""


class Phases:
    """Tells profilers which phase of a run is under way: torch's, as ranges with these names, and ``timers``.

    The loop asks before each phase whether anybody listens (``profiler._is_profiler_enabled or phases.timers``: two attribute reads, 30 ns),
    and runs it through :meth:`named` only then. Any torch profiler sees the ranges, also one that the user started around ``fit.run``.
    """

    __slots__ = ("timers",)

    def __init__(self) -> None:
        self.timers: tuple[Timer, ...] = ()
        """Add one with ``phases.timers += (timer,)``. Times are those of the host: a device may still compute when a phase ends."""

    def timed(self, name: str) -> Phase:
        """The phase ``name``, as a context."""
        return Phase(name, self)

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as the phase ``name``; ``function`` itself while nobody listens."""
        if not (profiler._is_profiler_enabled or self.timers):
            return function
        return partial(self._call, name, function)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if profiler._is_profiler_enabled:
            with Phase(name, self):
                return function(*args, **kwargs)
        began = time.perf_counter()
        result = function(*args, **kwargs)
        took = time.perf_counter() - began
        for timer in self.timers:
            timer(name, took)
        return result


class Phase:
    """One phase, from ``with`` to its end."""

    __slots__ = ("_began", "_name", "_phases", "_range")

    def __init__(self, name: str, phases: Phases) -> None:
        self._name, self._phases = name, phases

    def __enter__(self) -> None:
        self._range = profiler.record_function(self._name) if profiler._is_profiler_enabled else None
        if self._range is not None:
            self._range.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        took = time.perf_counter() - self._began
        if self._range is not None:
            self._range.__exit__(None, None, None)
        for timer in self._phases.timers:
            timer(self._name, took)


@contextmanager
def checkpoint_phase(phases: Phases, times: Times) -> Iterator[None]:
    """The phase ``checkpoint``, whose time is added to the run's."""
    began = time.perf_counter()
    with phases.timed("checkpoint"):
        yield
    times.checkpoint += time.perf_counter() - began


Batch = TypeVar("Batch")


class Intervals:
    """When validation, publishing and garbage collection are due, as the settings say."""

    def __init__(self, settings: Settings) -> None:
        self.validation = Every(settings.val_every)
        self.publishing = Every(settings.log_every_n_steps or None)
        self.garbage = Every(settings.gc_every_n_steps or None)

    def start(self, step: int, epochs: Fraction | None) -> None:
        """Start, or continue, at ``step``, when ``epochs`` are done."""
        self.validation.start(step, epochs)
        self.publishing.start(step)
        self.garbage.start(step)


class EpochClock:
    """Divides an epoch into waiting for data and computing. Validation and checkpoints are measured separately."""

    __slots__ = ("_apart", "_entered", "_phases", "_times", "previous_s")

    def __init__(self, times: Times, phases: Phases) -> None:
        self._times, self._apart, self._phases = times, times.apart, phases
        self._entered = time.perf_counter()
        self.previous_s = 0.0
        """Seconds from the batch before the current one until the next was asked for; 0 with the first."""

    def waits_for(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and count the time until each one as waiting, the phase ``data``."""
        clock, times, phases = time.perf_counter, self._times, self._phases
        started, marked = clock(), _marked()
        for batch in batches:
            if marked is not None:
                marked.__exit__(None, None, None)
            came = clock()
            times.data += came - started
            for timer in phases.timers:
                timer("data", came - started)
            yield batch
            del batch  # the next one takes its memory
            started, marked = clock(), _marked() if profiler._is_profiler_enabled else None
            self.previous_s = started - came
        if marked is not None:
            marked.__exit__(None, None, None)
        waited = clock() - started  # until the end of the data
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
