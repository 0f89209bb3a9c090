"""A pipeline over two ranks: what is drawn from the device's generator before the model's call is noticed."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import simulated as sim
import torch
from torch import nn
from torch.nn import functional as F

from engine import Fit, MeshParallel, TrainModule


class Net(TrainModule):
    """Its inputs may lose some values, on the device."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = dropout
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = F.dropout(batch, self.dropout) if self.dropout else batch
        return self(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(dropout: float) -> None:
    fit = Fit(
        strategy=MeshParallel(pp=2),
        accelerator="sim",
        devices=2,
        max_steps=1,
        root_dir=tempfile.mkdtemp(),
        num_sanity_val_steps=0,
    )
    fit.run(Net(dropout), [torch.ones(4, 4) for _ in range(2)])


def random_numbers_of_the_device_before_the_model() -> None:
    _train(0.0)
    try:
        _train(0.5)
    except Exception as error:
        told = str(error)
    else:
        told = "no error"
    # The rank with the inputs finds it; the other one is told.
    assert os.environ["RANK"] != "0" or "were drawn before the model was called (from torch on sim)" in told, told
    assert told != "no error"
    assert sim.races() == []
