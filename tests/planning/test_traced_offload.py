"""Activation offload in a plan: what leaves, what stays, and what the link's bandwidth makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Fit, TrainModule
from engine.planning.plan import Plan

ROWS, WIDTH, MIB = 4096, 64, 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(TrainModule):
    """Four blocks, each of which saves its input and tanh's result, a MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def planned(device: str = "h100", **settings: Any) -> Plan:
    return Fit(**settings).plan(Net(), [torch.ones(ROWS, WIDTH)] * 3, world_size=1, device=device)


def test_three_blocks_leave_and_two_are_on_the_device() -> None:
    plain, offloaded = planned(), planned(activation_offload=True, accumulate_grad_batches=3)
    moved = offloaded.traces[0].offloaded
    assert moved is not None
    # The third block's are still on the device when the backward pass wants them.
    assert (moved.host_bytes, moved.sent_bytes, moved.returned_bytes) == (6 * MIB, 3 * 6 * MIB, 3 * 4 * MIB)
    assert plain.traces[0].offloaded is None
    activations = [plan.traces[0].peak.memory.activations for plan in (plain, offloaded)]
    assert activations[0] - activations[1] >= 3 * MIB, activations
    assert planned("cpu", activation_offload=True).traces[0].offloaded is None


def test_what_takes_longer_than_its_pass_is_not_hidden() -> None:
    plan = planned(activation_offload=True)
    (fast,) = replace(plan, device=replace(plan.device, to_host=1e15)).times
    assert (fast.offload_s, fast.host_s) == (0, 0)
    rate = 1e8
    slow = replace(plan, device=replace(plan.device, to_host=rate / plan.device.reached.links))
    (time,) = slow.times
    passes = time.compute.seconds + time.offload_s
    assert passes >= 10 * MIB / rate  # 6 out beside the forward pass, 4 back beside the backward pass
    assert time.expected_s == pytest.approx(fast.expected_s + time.offload_s)
    assert "6.00 MiB of pinned memory for each rank; 6.00 MiB out and 4.00 MiB back a step" in str(slow)
    assert slow.as_json()["ranks"][0]["offloaded"]["waiting_s"] == time.offload_s
