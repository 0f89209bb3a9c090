from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.loop.epoch_clock import EpochClock
from engine.loop.phases import Phases
from engine.loop.result import Times


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows: its one element is set by the test."""
    shown = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: shown[0])
    return shown


def test_an_epoch_is_divided_between_data_computing_and_what_measures_itself(now: list[float]) -> None:
    times = Times(data=1.0, compute=2.0, validation=3.0)

    def batches() -> Iterator[int]:
        for number in range(3):
            now[0] += 0.5  # the loader
            yield number
        now[0] += 0.25  # it finds that it has ended

    clock, before = EpochClock(times, Phases()), []
    for _ in clock.waits_for(batches()):
        before.append(clock.previous_s)
        now[0] += 2.0
        now[0] += 10.0  # a validation, which measures itself
        times.validation += 10.0
    clock.stop()
    assert before == [0.0, 12.0, 12.0]
    assert times == Times(data=1.0 + 3 * 0.5 + 0.25, compute=2.0 + 3 * 2.0, validation=3.0 + 30.0)


def test_an_epoch_that_is_left_in_its_middle_counts_what_it_was(now: list[float]) -> None:
    times = Times()
    clock = EpochClock(times, Phases())
    for number in clock.waits_for(range(5)):
        now[0] += 1.0
        if number == 1:
            break
    clock.stop()
    assert (times.data, times.compute) == (0.0, 2.0)
