"""Durations of phases and hooks, against what is known to happen in the run."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from support.ranks import run_ranks

from callbacks import EarlyStopping, ModelCheckpoint, SimpleProfiler
from engine import Callback


class Sleeps(Callback):
    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)


def counts(profiler: SimpleProfiler) -> dict[str, int]:
    return {name: count for name, (count, _) in profiler.durations.items()}


def test_phases_and_hooks_are_counted_and_timed(make_fit, scripted, batches, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="engine")

    class Net(scripted):
        def on_train_start(self) -> None: ...

    profiler = SimpleProfiler(filename="durations")
    stopping = EarlyStopping("score")
    make_fit(callbacks=[profiler, Sleeps(), stopping]).run(Net([1.0]), batches, batches)
    found = counts(profiler)
    # 4 batches and the end of the data; one validation of all.
    assert {name: found[name] for name in ("data", "forward", "backward", "optimizer", "validation")} == {
        **dict.fromkeys(("forward", "backward", "optimizer"), 4),
        "data": 5,
        "validation": 1,
    }
    assert found["[TrainModule]Net.on_train_start"] == 1
    assert found[f"[Callback]{stopping.state_key}.on_validation_end"] == 1
    count, total = profiler.durations["[Callback]Sleeps.on_train_batch_start"]
    assert count == 4
    assert total >= 0.04
    assert not any("SimpleProfiler" in name for name in found)
    text = (tmp_path / "fit-durations-0.txt").read_text()
    head, columns = text.splitlines()[:2]
    assert head.endswith(" s in all")
    assert [c.strip() for c in columns.split("|")] == [
        *("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"),
    ]
    row = next(line for line in text.splitlines() if line.startswith("[Callback]Sleeps.on_train_batch_start"))
    mean, calls, seconds, share = (float(c) for c in row.split("|")[1:])
    assert calls == 4
    assert mean * 4 == pytest.approx(seconds, rel=1e-3)
    assert share == pytest.approx(100 * seconds / float(head.split()[0]), rel=1e-2)
    assert row in caplog.text


def test_a_resumed_run_continues_the_sums(make_fit, scripted, batches):
    first, second = SimpleProfiler(), SimpleProfiler()
    make_fit(callbacks=[first, ModelCheckpoint(every=2)], max_steps=2).run(scripted(), batches)
    make_fit(callbacks=[second, ModelCheckpoint(every=2)], max_epochs=1).run(scripted(), batches, resume="last")
    assert (counts(first)["forward"], counts(second)["forward"]) == (2, 4)
    assert second.durations["forward"][1] > first.durations["forward"][1]


def test_the_short_form_has_lightnings_columns(make_fit, scripted, batches):
    profiler = SimpleProfiler(extended=False)
    make_fit(callbacks=[profiler]).run(scripted(), batches)
    columns = [c.strip() for c in profiler.summary().splitlines()[1].split("|")]
    assert columns == ["Action", "Mean duration (s)", "Total time (s)"]


def test_a_run_after_it_starts_at_zero(make_fit, scripted, batches):
    profiler = SimpleProfiler()
    make_fit(callbacks=[profiler]).run(scripted(), batches)
    make_fit(callbacks=[profiler]).test(scripted(), batches)
    assert counts(profiler)["test"] == 1
    assert "forward" not in counts(profiler)


def test_a_folder_without_a_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="writes no file without filename"):
        SimpleProfiler(dirpath=tmp_path)


RANKS = """
import sys
sys.path.insert(0, "tests")
from support.toys import Weight, fit, ones
from callbacks import SimpleProfiler
profiler = SimpleProfiler(dirpath=sys.argv[1], filename="all")
fit(sys.argv[1], devices="auto", callbacks=[profiler]).run(Weight(), ones(8))
report({name: count for name, (count, _) in profiler.durations.items()})
"""


def test_every_rank_measures_itself(tmp_path):
    for rank in run_ranks(RANKS, 2, tmp_path):
        assert rank.value == {"data": 5, "forward": 4, "backward": 4, "optimizer": 4}
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["fit-all-0.txt", "fit-all-1.txt"]
