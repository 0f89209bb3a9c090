"""Monitoring of a run: progress, agreement of the ranks, and garbage collection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from engine.health import mismatch
from engine.health.watchdog import Watchdog
from engine.loop.run import Run


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """A run that hangs ends with :class:`engine.HangError`; ranks that differ in debug mode with :class:`engine.MismatchError`."""
    settings, group = run.settings, run.engine.group
    start = timedelta(seconds=settings.start_timeout.value)
    group.limit(start)  # an earlier run has left it short
    dog = None
    if settings.timeout is not None:
        first_s, limit_s = start.total_seconds(), settings.timeout.value
        dog = Watchdog(
            group,
            lambda: run.state.batches + run.pulse,
            first_s=first_s,
            limit_s=limit_s,
            directory=run.home.path / "hang",
        )
    try:
        yield
    except BaseException as error:
        better = (dog.explain(error) if dog is not None else None) or mismatch.explain(error, group)
        if better is not None and better is not error:
            raise better from error
        raise
    finally:
        if dog is not None:
            dog.stop()
        group.limit(start)  # what follows has no steps: the last checkpoint, callbacks' cleanup
        run.control.first_step_done = False


@contextmanager
def collected(run: Run) -> Iterator[None]:
    """Garbage is collected at every ``gc_every_n_steps``-th step, on all ranks at once."""
    if run.settings.gc_every_n_steps:
        run.garbage.begin(run.control.stopwatch.seconds_before)
    try:
        yield
    finally:
        run.garbage.end(run.elapsed_s)
