"""Windows of torch's profiler: what they hold, where they go, and what happens when a run ends in one."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from callbacks import ModelCheckpoint, Profiler
from engine import Callback

STEP = ("data", "forward", "backward", "optimizer")


def traced(folder: Path) -> dict[str, Counter[str]]:
    """How often each phase is in each trace, by the file's name."""
    found = {}
    for path in sorted((folder / "profiler").glob("*.pt.trace.json.gz")):
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        named = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["name"] in STEP]
        found[path.name.removesuffix(".pt.trace.json.gz")] = Counter(named)
    return found


def test_each_window_has_its_micro_batches(make_fit, scripted, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="engine")
    data = [torch.ones(2, 1) for _ in range(16)]
    profiler = Profiler(wait=2, warmup=1, active=3, repeat=2, sort_by="cpu_time_total", row_limit=100)
    make_fit(callbacks=[profiler], log_every_n_steps=0).run(scripted(), data)
    # 2 + 1 + 3 micro-batches each time.
    each = dict.fromkeys(STEP, 3)
    assert traced(tmp_path) == {"rank=0_step=00000006": each, "rank=0_step=00000012": each}
    table = (tmp_path / "profiler" / "rank=0_step=00000006.txt").read_text()
    assert "backward" in table
    assert "aten::mean" in table
    assert table in caplog.text


def test_numbers_count_micro_batches(make_fit, scripted, tmp_path):
    data = [torch.ones(2, 1) for _ in range(8)]
    make_fit(callbacks=[Profiler(wait=0, warmup=0, active=4)], accumulate_grad_batches=2).run(scripted(), data)
    assert traced(tmp_path) == {"rank=0_step=00000002": {"data": 4, "forward": 4, "backward": 4, "optimizer": 2}}


def test_a_run_that_ends_in_a_window_writes_what_there_is(make_fit, scripted, batches, tmp_path, caplog):
    make_fit(callbacks=[Profiler(wait=1, warmup=1, active=10)]).run(scripted(), batches)
    # The second "data" of the last step finds the end of the epoch.
    assert traced(tmp_path) == {"rank=0_step=00000004": dict.fromkeys(STEP, 2) | {"data": 3}}
    assert "ended after 2 of the window's 10 micro-batches" in caplog.text


def test_an_error_in_a_window_leaves_its_trace_and_stays_itself(make_fit, scripted, batches, tmp_path):
    class Fails(Callback):
        def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ArithmeticError("its own")

    with pytest.raises(ArithmeticError, match="its own"):
        make_fit(callbacks=[Profiler(wait=1, warmup=1, active=10), Fails()]).run(scripted(), batches)
    assert traced(tmp_path) == {"rank=0_step=00000003": {"data": 2, "forward": 1, "backward": 1, "optimizer": 1}}


def test_a_run_that_is_too_short_is_a_warning(make_fit, scripted, batches, tmp_path, caplog):
    make_fit(callbacks=[Profiler(wait=100)]).run(scripted(), batches)
    assert "nothing was profiled: the run ended after 4 micro-batches, wait=100" in caplog.text
    caplog.clear()
    make_fit(callbacks=[Profiler(wait=0, warmup=9)]).run(scripted(), batches)
    assert "ended while the profiler warmed up" in caplog.text


def test_a_resumed_run_continues_to_count(make_fit, scripted, tmp_path):
    data = [torch.ones(2, 1) for _ in range(12)]

    def profiler() -> Profiler:
        return Profiler(wait=2, warmup=1, active=2, repeat=2)

    # Killed in the second window, after its warm-up: that one is written short, and again by the resumed run.
    make_fit(callbacks=[profiler(), ModelCheckpoint(every=7)], max_steps=7).run(scripted(), data)
    assert sorted(traced(tmp_path)) == ["rank=0_step=00000005"]
    make_fit(callbacks=[profiler(), ModelCheckpoint(every=7)], max_steps=12).run(scripted(), data, resume="last")
    found = traced(tmp_path)
    assert sorted(found) == ["rank=0_step=00000005", "rank=0_step=00000010"]
    assert found["rank=0_step=00000010"] == dict.fromkeys(STEP, 2)


def test_an_evaluation_is_counted_in_its_batches(make_fit, scripted, batches, tmp_path):
    make_fit(callbacks=[Profiler(wait=1, warmup=1, active=1)]).test(scripted(), batches)
    assert sorted(traced(tmp_path)) == ["rank=0_step=00000000"]


def test_another_profiler_in_the_process_is_an_error(make_fit, scripted, batches):
    with torch.profiler.profile(), pytest.raises(ValueError, match="another torch profiler is running"):
        make_fit(callbacks=[Profiler()]).run(scripted(), batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"active": 0}, "active=0.*at least 1"),
        ({"wait": -1}, "wait=-1.*at least 0"),
        ({"warmup": 1.5}, "warmup=1.5"),
        ({"sort_by": "time"}, "sort_by='time'.*self_cpu_time_total"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Profiler(**arguments)


def test_a_memory_snapshot_needs_a_device_that_records_them(make_fit, scripted, batches):
    with pytest.raises(
        ValueError,
        match=r"memory_snapshot=True\) needs a device that records its allocations, .*, and this run is on cpu",
    ):
        make_fit(callbacks=[Profiler(memory_snapshot=True)]).run(scripted(), batches)


RANKS = """
import sys
sys.path.insert(0, "tests")
from support.toys import Weight, fit, ones
from callbacks import Profiler
result = fit(sys.argv[1], devices="auto", callbacks=[Profiler(wait=1, warmup=1, active=2)]).run(Weight(), ones(16))
report(result.step)
"""


def test_every_rank_writes_its_own_trace(tmp_path):
    run_ranks(RANKS, 2, tmp_path)
    found = traced(tmp_path)
    assert sorted(found) == ["rank=0_step=00000004", "rank=1_step=00000004"]
    assert set(map(str, found.values())) == {str(Counter(dict.fromkeys(STEP, 2)))}
