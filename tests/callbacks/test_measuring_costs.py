"""What the measuring callbacks call in a step between two log boundaries: a number that does not depend on the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import callbacks
from callbacks import (
    EMA,
    CSVLogger,
    DeviceStatsMonitor,
    GradientNorm,
    JSONLLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    Profiler,
    ReplicaCheck,
    Report,
    RichProgressBar,
    SimpleProfiler,
    StragglerMonitor,
    TensorBoardLogger,
    ThroughputMonitor,
)

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


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_between_log_boundaries_nothing_is_read_from_the_device(make_fit, scripted):
    pytest.importorskip("tensorboard")
    reads, found = Reads(), []

    class Counts(scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx in (10, 30):
                found.append(reads.count)
            return super().training_step(batch, batch_idx)

    made = [
        *(CSVLogger(), JSONLLogger(), TensorBoardLogger(), RichProgressBar(), Report(), LearningRateMonitor()),
        *(ThroughputMonitor(), DeviceStatsMonitor(), StragglerMonitor(every_n_steps=1000), EMA(), GradientNorm()),
        *(ReplicaCheck(every_n_steps=1000), SimpleProfiler(), ModelCheckpoint(every=1000)),
    ]
    with reads:
        make_fit(callbacks=made, log_every_n_steps=50).run(Counts(), [torch.ones(2, 1)] * 40)
    assert found[1] == found[0] > 0  # those of the first step, which is logged
