"""Strategies say in planning what a plan asks of them; a package's own strategy has a case of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine import Fit, MeshParallel, TrainModule
from engine.planning.strategy_facts import StrategyFacts, strategy_facts
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Offloading(DDP):
    """A strategy of somebody else."""


@strategy_facts.register
def _offloading(strategy: Offloading) -> StrategyFacts:
    return StrategyFacts(on_host=("optimizer_state",), overlaps=False)


def test_what_is_offloaded_by_strategy() -> None:
    everything = ("parameters", "gradients", "optimizer_state")
    assert strategy_facts(DDP()).on_host == strategy_facts(FSDP()).on_host == ()
    assert strategy_facts(FSDP(cpu_offload=True)).on_host == everything
    assert strategy_facts(MeshParallel(tp=2, cpu_offload=True)).on_host == everything


def test_a_strategy_of_another_package_has_its_own_case() -> None:
    data = [torch.zeros(2, 4)] * 4
    trace = Fit(strategy=Offloading()).plan(Net(), data, world_size=2, device="h100").traces[0]
    assert trace.on_host == {"optimizer_state": 2 * 20 * 4 + 2 * 4}
    assert not trace.overlaps
