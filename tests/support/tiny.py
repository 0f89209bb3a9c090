"""The smallest run that saves something, and a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import Fit, TrainModule

DATA = [torch.ones(2, 4)] * 4


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(root: Path, *callbacks: Any, **settings: Any) -> Fit:
    return Fit(accelerator="cpu", root_dir=root, callbacks=list(callbacks), **{"max_epochs": 3, **settings})


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
