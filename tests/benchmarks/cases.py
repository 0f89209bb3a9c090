"""What is trained in the benchmarks: a tiny model, so that the loop around it is what the clock sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]
"""Inputs (batch, features) and targets (batch, 1)."""

BATCH_SIZE = 8
POOL = 64


def make_net(sizes: Sequence[int]) -> nn.Module:
    """Linear layers of these sizes with ReLU between them, equal weights at every call."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of one batch, a scalar."""
    inputs, targets = batch
    return F.mse_loss(net(inputs), targets)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: what a step consists of."""

    name: str
    logs: int = 0
    """Calls of ``self.log`` (or what a peer has for it) in every step."""
    callbacks: int = 0
    """Callbacks installed, each with an empty hook before and after every batch."""
    window: int = 1
    """Micro-batches of one optimizer step."""
    bf16: bool = False
    loader: bool = False
    """A ``DataLoader`` over a ``TensorDataset`` in place of a list of batches made beforehand."""
    ddp: bool = False
    """DistributedDataParallel over the ranks of the default process group."""
    sizes: tuple[int, ...] = (BATCH_SIZE, 1)
    net: Callable[[Sequence[int]], nn.Module] = make_net

    def work(self, steps: int) -> Work:
        """This case with data for exactly ``steps`` optimizer steps, in one epoch, made outside the timed span."""
        generator = torch.Generator().manual_seed(1)
        count = steps * self.window
        if self.loader:
            inputs = torch.randn(count * BATCH_SIZE, self.sizes[0], generator=generator)
            return Work(
                self, steps, DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=BATCH_SIZE)
            )
        # Under DDP every batch is the same one, so that it does not matter how a trainer shares a list out to its ranks.
        pool = [torch.randn(BATCH_SIZE, self.sizes[0], generator=generator) for _ in range(1 if self.ddp else POOL)]
        batches = [(inputs, inputs.mean(1, keepdim=True)) for inputs in pool]
        return Work(self, steps, list(islice(cycle(batches), count)))


@dataclass(frozen=True)
class Work:
    """A case with its data: ``steps`` optimizer steps in one epoch."""

    case: Case
    steps: int
    data: Any
    """A list of batches or a DataLoader; ``steps * case.window`` batches in all."""

    def build(self) -> nn.Module:
        return self.case.net(self.case.sizes)


@dataclass(frozen=True)
class Contender:
    """A way to train. ``train`` does a whole run from nothing and returns the trained net."""

    name: str
    kind: Literal["bare", "ours", "peer"]
    train: Callable[[Work], nn.Module]
    logs: bool = False
    callbacks: bool = False

    def can(self, case: Case) -> bool:
        """Whether the case means something here: in a hand-written loop there is no trainer that logs or calls back."""
        return (self.logs or not case.logs) and (self.callbacks or not case.callbacks)


LOCAL_CASES = (
    Case("plain"),
    Case("one log", logs=1),
    Case("twenty logs", logs=20),
    Case("ten callbacks", callbacks=10),
    Case("accumulate 4", window=4),
    Case("bf16", bf16=True),
    Case("DataLoader", loader=True),
)
DDP_CASES = (
    Case("DDP tiny", ddp=True),
    Case("DDP 83 k", ddp=True, sizes=(64, 256, 256, 1)),
)


def named(cases: Sequence[Case], names: Sequence[str]) -> tuple[Case, ...]:
    """The cases with these names, in the table's order; all of them when no name is given."""
    return tuple(case for case in cases if not names or case.name in names)
