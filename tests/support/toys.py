"""Modules whose numbers can be worked out by hand, and a ``Fit`` on one CPU process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import Callback, Fit, TrainModule


class Weight(TrainModule):
    """One weight ``w``, trained by SGD with learning rate 1; the loss of a batch is ``w * mean(batch)``: its gradient is the batch's mean."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((1,), start))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", (self.w * batch).mean())

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test", batch.mean())

    def forward(self, batch: Tensor) -> Tensor:
        return self.w * batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Events(Callback):
    """Writes down which of its ``names`` were called, in order."""

    def __init__(self, *names: str) -> None:
        self.seen: list[str] = []
        for name in names:
            setattr(self, name, lambda *args, name=name: self.seen.append(name))


def ones(count: int, size: int = 2) -> list[Tensor]:
    """``count`` batches of ones, shape [size, 1] each."""
    return [torch.ones(size, 1) for _ in range(count)]


def fit(root: Path | str, **settings: Any) -> Fit:
    """On one CPU process, without the sanity check unless it is asked for."""
    return Fit(**{"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "root_dir": root, **settings})


LINEAR_BATCHES = [torch.ones(2, 4)] * 4
"""One epoch for :class:`Linear`."""


class Linear(TrainModule):
    """A linear layer trained by SGD with momentum: the smallest module whose optimizer has a state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def linear_fit(root: Path, *callbacks: Any, **settings: Any) -> Fit:
    """A ``Fit`` of three epochs on the CPU, on as many ranks as the job has."""
    return Fit(accelerator="cpu", root_dir=root, callbacks=list(callbacks), **{"max_epochs": 3, **settings})
