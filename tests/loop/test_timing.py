"""Which phases profilers see, with every way to train; and an epoch's times."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from callbacks import ModelCheckpoint
from engine import Callback, Run
from engine.loop.state import Times
from engine.loop.timing import EpochClock, Phases

NAMES = {
    *("data", "forward", "backward", "optimizer", "validation", "checkpoint"),
    *("training_step", "test", "predict"),
}


def ranges(profiler: profile) -> list[tuple[str, str | None]]:
    """Each phase in the order of time, with the phase around it."""
    events = [event for event in profiler.events() or () if event.name in NAMES and event.device_type.name == "CPU"]
    events.sort(key=lambda event: event.time_range.start)
    found = []
    for event in events:
        parent = event.cpu_parent
        while parent is not None and parent.name not in NAMES:
            parent = parent.cpu_parent
        found.append((event.name, None if parent is None else parent.name))
    return found


def test_a_profiler_around_the_run_sees_every_phase_in_order(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        fit(tmp_path, accumulate_grad_batches=2, callbacks=[ModelCheckpoint(asynchronous=False)]).run(
            Weight(), ones(4), ones(1)
        )
    step = ["data", "forward", "backward", "data", "forward", "backward", "optimizer"]
    # The last "data" finds that the epoch is over.
    names = [name for name, _ in ranges(profiler)]
    assert names[:17] == [*step, *step, "data", "validation", "checkpoint"]
    assert set(names[17:]) <= {"checkpoint"}  # waiting for it
    assert {parent for _, parent in ranges(profiler)} == {None}


def test_a_profiler_that_starts_in_the_middle_sees_the_steps_of_its_window(tmp_path: Path) -> None:
    class Window(Callback):
        def __init__(self) -> None:
            self.profiler = profile(
                activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=1, active=2, repeat=1)
            )
            self.profiler.start()

        def on_train_batch_end(self, run: Run, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.profiler.step()

    window = Window()
    fit(tmp_path, callbacks=[window]).run(Weight(), ones(8))
    assert Counter(name for name, _ in ranges(window.profiler)) == dict.fromkeys(
        ("data", "forward", "backward", "optimizer"), 2
    )


def test_test_and_predict_are_phases(tmp_path: Path) -> None:
    class Predicts(Weight):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            return batch

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        fit(tmp_path).test(Predicts(), ones(2))
        fit(tmp_path).predict(Predicts(), ones(2))
    assert [name for name, _ in ranges(profiler)] == ["test", "predict"]


class ByHand(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.w * batch).mean())
        optimizer.step()


class WithClosure(Weight):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=1)


def test_what_runs_inside_another_phase_is_nested(tmp_path: Path) -> None:
    found = []
    for module in (ByHand(), WithClosure()):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            fit(tmp_path).run(module, ones(1))
        found.append(ranges(profiler)[1:-1])
    assert found[0] == [("training_step", None), ("backward", "training_step"), ("optimizer", "training_step")]
    # LBFGS takes the loss and the gradients that exist already.
    assert found[1] == [("forward", None), ("backward", None), ("optimizer", None)]


def test_timers_get_the_name_and_the_seconds_of_each_phase(tmp_path: Path) -> None:
    class Times(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, float]] = []

        def on_fit_start(self, run: Run, module: Any) -> None:
            run.phases.timers += (lambda name, seconds: self.seen.append((name, seconds)),)

    times = Times()
    result = fit(tmp_path, callbacks=[times]).run(Weight(), ones(2), ones(1))
    step = ["data", "forward", "backward", "optimizer"]
    assert [name for name, _ in times.seen] == [*step, *step, "data", "validation"]
    assert all(0 < seconds < 100 for _, seconds in times.seen)
    # The run measures the same waiting by itself, a little around it.
    assert sum(seconds for name, seconds in times.seen if name == "data") <= result.times.data


def test_a_step_calls_nothing_for_phases_while_nobody_listens(tmp_path: Path) -> None:
    called: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_qualname.startswith(("Phases.", "Phase.")):
            called.append(frame.f_code.co_name)

    class Watched(Weight):
        def on_train_start(self) -> None:
            sys.setprofile(note)

        def on_train_end(self) -> None:
            sys.setprofile(None)

    fit(tmp_path).run(Watched(), ones(4))
    assert called == []


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
