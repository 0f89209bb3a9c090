"""What the measuring callbacks call in a step between two log boundaries: a number that does not depend on the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import callbacks
from callbacks import DeviceStatsMonitor, Profiler, ReplicaCheck, SimpleProfiler, StragglerMonitor, ThroughputMonitor

OURS = str(Path(callbacks.__file__).parent)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ThroughputMonitor(peak_flops=1e9), 0),
        (DeviceStatsMonitor, 0),
        (lambda: StragglerMonitor(every_n_steps=1000), 5),  # four phases and the end of the micro-batch
        (lambda: ReplicaCheck(every_n_steps=1000), 1),
        (lambda: Profiler(wait=1000), 3),
        (SimpleProfiler, 4),
    ],
    ids=["throughput", "device", "straggler", "replica", "profiler", "simple"],
)
def test_calls_in_a_step(make_fit, scripted, make, expected):
    called: list[int] = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        called[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    class Counts(scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx in (10, 30):
                sys.setprofile(note if batch_idx == 10 else None)
            return super().training_step(batch, batch_idx)

    make_fit(callbacks=[make()], log_every_n_steps=50).run(Counts(), [torch.ones(2, 1)] * 40)
    assert called[0] == 20 * expected
