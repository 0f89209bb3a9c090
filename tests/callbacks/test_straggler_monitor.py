"""A rank that is slow on purpose is named, with the phase; equal ranks are not."""

from __future__ import annotations

from typing import Any

import pytest
from support.ranks import run_ranks

from callbacks import ModelCheckpoint, StragglerMonitor
from engine import Callback


class Seen(Callback):
    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        found = {name.removeprefix("straggler/"): v for name, v in metrics.items() if "straggler/" in name}
        if found:
            self.values[step] = found


def test_the_slow_ranks_of_a_table():
    monitor = StragglerMonitor(threshold=2.0, min_seconds=0.01)
    monitor._compared = ("data", "forward")
    fast = [0.001, 0.030, 9.0, 0.0]
    assert monitor._slow_ranks([fast, fast, [0.1, 0.030, 0.0, 0.0], fast]) == {
        2: "data takes 100 ms a step, 1 ms on the median rank"
    }
    assert monitor._slow_ranks([fast, [0.1, 0.061, 0.0, 0.0]]) == {
        1: "data takes 100 ms a step, 1 ms on the median rank; forward takes 61 ms a step, 30 ms on the median rank"
    }
    assert (
        monitor._slow_ranks([fast, [0.009, 0.059, 0.0, 0.0]]) == {}
    )  # 9 times as long, but only 8 ms more; not twice as long
    assert monitor._slow_ranks([fast]) == {}


def test_one_process_logs_its_phases(make_fit, scripted, batches):
    seen = Seen()
    make_fit(callbacks=[StragglerMonitor(every_n_steps=2), seen], log_every_n_steps=1, max_epochs=2).run(
        scripted(), batches
    )
    assert sorted(seen.values) == [4, 6, 8]  # the first two steps are not measured
    for found in seen.values.values():
        assert set(found) == {"data", "forward", "backward", "optimizer", "slowest_rank"}
        assert all(0 < found[name] < 10 for name in ("data", "forward", "backward", "optimizer"))


def test_a_resumed_run_counts_from_its_own_start(make_fit, scripted, batches):
    for steps, expected in ((5, [4]), (10, [9])):
        seen = Seen()
        monitor = StragglerMonitor(every_n_steps=2)
        make_fit(callbacks=[monitor, seen, ModelCheckpoint(every=5)], max_steps=steps, log_every_n_steps=1).run(
            scripted(), batches * 3, resume="auto"
        )
        assert sorted(seen.values) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"every_n_steps": 0}, "at least 1"), ({"threshold": 1.0}, "more than 1"), ({"min_seconds": -1}, "at least 0")],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        StragglerMonitor(**arguments)


RANKS = """
import logging, os, sys
from types import SimpleNamespace
sys.path[:0] = ["tests", "tests/callbacks"]
import torch
from torch.utils.data import DataLoader, TensorDataset
from support.toys import Weight, fit
from test_straggler_monitor import Seen
from callbacks import StragglerMonitor
from engine.loop import timing

rank, now = os.environ["RANK"], [100.0]
timing.time = SimpleNamespace(perf_counter=lambda: now[0])  # a clock that only slowness on purpose moves: a busy machine does not
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("engine").addHandler(handler)

class Slow(TensorDataset):
    def __getitem__(self, index):
        now[0] += 0.125 if rank == "1" and where == "data" else 0
        return super().__getitem__(index)

class Net(Weight):
    def training_step(self, batch, batch_idx):
        now[0] += 0.25 if rank == "0" and where == "forward" else 0
        return (self.w * batch[0]).mean()

found = {}
for where in ("data", "forward"):
    said.clear()
    seen, monitor = Seen(), StragglerMonitor(every_n_steps=4, threshold=1.5, min_seconds=0.1)
    loader = DataLoader(Slow(torch.ones(24, 1)), batch_size=2)
    fit(sys.argv[1] + where, devices="auto", log_every_n_steps=6, callbacks=[monitor, seen]).run(Net(), loader)
    found[where] = [seen.values, {str(k): v for k, v in monitor.slow.items()}, [s for s in said if "Straggler" in s]]
report(found)
"""


def test_the_slow_rank_is_named_on_both(tmp_path):
    first, second = (rank.value for rank in run_ranks(RANKS, 2, tmp_path))
    for where, rank, seconds in (("data", 1, 0.25), ("forward", 0, 0.25)):
        (values, slow, said), (same, same_slow, silent) = first[where], second[where]
        assert values == same
        assert slow == same_slow
        assert list(slow) == [str(rank)]
        assert slow[str(rank)].startswith(f"{where} takes ")
        assert values["6"]["slowest_rank"] == rank
        assert values["6"][where] == seconds
        assert len(said) == 1
        assert silent == []
        assert f"StragglerMonitor: rank {rank} (" in said[0]
