"""Validations that are due between the micro-batches of one optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from callbacks import BatchValidation
from engine import Fit, TrainModule


class Net(TrainModule):
    """Remembers after which step it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(1, 1), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def on_validation_start(self) -> None:
        self.steps.append(self.run.step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("interval", "window", "epochs", "steps"),
    [
        (
            2,
            3,
            1,
            [1, 2, 3, 4],
        ),  # due after batches 2, 4, 6, 8, 10, 12 of each epoch: once for each weights, but not for the first
        (1, 4, 1, [1, 2, 3]),
        (5, 6, None, [1]),
        (3, 3, 1, [1, 2, 3, 4]),
        (0.25, 4, 1, [1, 2, 3]),
    ],
)
def test_an_interval_within_a_window(interval: float, window: int, epochs: int | None, steps: list[int]) -> None:
    net = Net()
    batches = [torch.ones(1, 1)] * 12
    callbacks = [BatchValidation(interval, epochs)]
    Fit(max_epochs=1, accumulate_grad_batches=window, callbacks=callbacks, num_sanity_val_steps=0).run(
        net, batches, [torch.ones(1, 1)]
    )
    assert net.steps == steps
