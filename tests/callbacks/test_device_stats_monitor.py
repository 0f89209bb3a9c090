"""Memory and processor time, against the system's own numbers."""

from __future__ import annotations

import importlib.util
import json
import mmap
import time
from typing import Any

import psutil
import pytest
import torch
from support.ranks import run_ranks

from callbacks import DeviceStatsMonitor, ModelCheckpoint
from engine import Callback


class Seen(Callback):
    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if found := {name: value for name, value in metrics.items() if name.startswith(("cpu/", "device/"))}:
            self.values[step] = found


def test_the_process_and_the_machine(make_fit, scripted):
    class Holds(Callback):
        """Keeps 200 MB from step 2 on, and sleeps after step 4."""

        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if run.step == 2:
                # Pages of its own: an allocator may have room left from earlier tests.
                self.kept = mmap.mmap(-1, 200_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for page in range(0, len(self.kept), mmap.PAGESIZE):
                    self.kept[page] = 1
            if run.step > 4:
                time.sleep(0.2)

    seen, holds = Seen(), Holds()
    make_fit(callbacks=[holds, DeviceStatsMonitor(), seen], log_every_n_steps=2).run(
        scripted([1.0]), [torch.ones(2, 1)] * 6, [torch.ones(2, 1)]
    )
    assert sorted(seen.values) == [1, 2, 4, 6]
    first, last = seen.values[1], seen.values[6]
    assert last["cpu/rss_bytes"] - first["cpu/rss_bytes"] > 150e6
    assert last["cpu/rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert last["cpu/process_percent"] < 100  # of 400 ms it slept most
    assert 0 <= last["cpu/percent"] <= 100
    assert 0 < last["cpu/memory_percent"] <= 100
    assert not any(name.startswith("device/") for name in last)


def test_without_psutil_the_rest_is_there(make_fit, scripted, batches, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "psutil" else find(name, *a))
    seen = Seen()
    make_fit(callbacks=[DeviceStatsMonitor(), seen]).run(scripted(), batches)
    assert set(seen.values[4]) == {"cpu/rss_bytes", "cpu/process_percent"}
    with pytest.raises(ModuleNotFoundError, match="needs psutil: pip install psutil"):
        DeviceStatsMonitor(cpu_stats=True)


def test_it_can_be_left_out(make_fit, scripted, batches):
    seen = Seen()
    make_fit(callbacks=[DeviceStatsMonitor(cpu_stats=False), seen]).run(scripted(), batches)
    assert seen.values == {}


def test_a_resumed_run_continues(make_fit, scripted, batches):
    for steps, expected in ((2, [1, 2]), (4, [4])):
        seen = Seen()
        make_fit(
            callbacks=[DeviceStatsMonitor(), seen, ModelCheckpoint(every=2)], max_steps=steps, log_every_n_steps=2
        ).run(scripted(), batches, resume="auto")
        assert sorted(seen.values) == expected


RANKS = """
import sys
sys.path[:0] = ["tests", "tests/callbacks"]
import os, torch
from support.toys import Weight, fit, ones
from test_device_stats_monitor import Seen
from callbacks import DeviceStatsMonitor

kept = torch.ones(100_000_000 if os.environ["RANK"] == "1" else 1)
seen = Seen()
fit(sys.argv[1], devices="auto", callbacks=[DeviceStatsMonitor(), seen]).run(Weight(), ones(4))
import psutil
report([seen.values, psutil.Process().memory_info().rss])
"""


def test_the_largest_value_of_all_ranks_is_logged_on_each(tmp_path):
    (first, small), (second, large) = (rank.value for rank in run_ranks(RANKS, 2, tmp_path))
    assert json.dumps(first) == json.dumps(second)
    assert first["2"]["cpu/rss_bytes"] == pytest.approx(large, rel=0.2)
    assert large - small > 300e6
