"""A model whose validation metric is written down beforehand, and a small Fit for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Fit, TrainModule


class Scripted(TrainModule):
    """One weight with gradient 1 in every micro-batch; validation number i logs ``score = scores[i]``."""

    def __init__(self, scores: Sequence[float] = (), lr: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.scores = list(scores)
        self.lr = lr
        self.validations = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).mean()
        self.log("train/weight", self.weight.detach()[0], prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", self.scores[min(self.validations, len(self.scores) - 1)])

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/mean", batch.mean())

    def on_validation_end(self) -> None:
        self.validations += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def batches() -> list[Tensor]:
    """Four micro-batches of ones, shape [2, 1]: one epoch."""
    return [torch.ones(2, 1) for _ in range(4)]


@pytest.fixture
def make_fit(tmp_path: Path) -> Callable[..., Fit]:
    """Fit on one CPU process under ``tmp_path``, without the sanity check."""

    def make(**settings: Any) -> Fit:
        return Fit(**{"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "root_dir": tmp_path, **settings})

    return make
