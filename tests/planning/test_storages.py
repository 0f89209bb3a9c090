"""The log of storages against another author's: torch's own tracker of FSDP sees the same step on the same simulated ranks, without the loop."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine import Fit, TrainModule

RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Blocks(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        # With foreach=True the tracker takes dead temporaries of the optimizer for its state.
        return torch.optim.AdamW(self.parameters(), foreach=False)


@pytest.mark.parametrize("rows", [4, 64])  # gradients on their way, or activations, are the largest part
def test_torchs_tracker_of_fsdp_agrees_to_the_byte(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Fit(strategy="fsdp").plan(Blocks(), [torch.zeros(rows, 16)] * RANKS, world_size=RANKS, device="cpu")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch sets its own for a job
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        module, batch = Blocks(), torch.zeros(rows, 16)
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        optimizer = module.configure_optimizers()
        tracker = FSDPMemTracker(module, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for step in range(2):
                module.training_step(batch, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not step:
                    tracker.reset_mod_stats()
        tracked = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    peak = plan.traces[0].peak.memory
    names = {getattr(kind, "name", kind): size for kind, size in tracked.items()}
    assert peak.total == names["Total"]
    assert (peak.parameters, peak.gradients, peak.optimizer_state) == (
        names["SHARDED_PARAM"],
        names["SHARDED_GRAD"],
        names["OPT"],
    )
    assert (peak.activations, peak.inputs) == (names["ACT"], names["INP"])
