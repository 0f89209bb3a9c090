"""A plan records a step of an epoch alone: what the loop does between two steps, and a setting that ends the training, do not show in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine import Callback, Fit, TrainModule
from engine.planning.plan import RankTrace

RANKS, ROWS, WIDTH = 4, 4, 20


class Net(TrainModule):
    """A layer 20 -> 5: 105 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Stops(Callback):
    """Asks the training to stop after each step."""

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run.stop("enough")


def traced(strategy: str = "ddp", **settings: Any) -> RankTrace:
    data = [torch.zeros(ROWS, WIDTH) for _ in range(4 * RANKS)]
    return Fit(strategy=strategy, **{"check": False, **settings}).plan(Net(), data, world_size=RANKS).traces[0]


def test_the_second_step_is_recorded() -> None:
    trace = traced()
    assert trace.timeline[0].memory.optimizer_state == 2 * 105 * 4 + 2 * 4  # moments, and a step for each parameter
    assert [(each.kind, each.count, each.bytes, each.phase) for each in trace.collectives] == [
        ("all_reduce", 1, 105 * 4, "backward")
    ]


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {"callbacks": Stops()}),
        ("ddp", {"limit_train_batches": 0}),
        ("ddp", {"max_steps": 1}),
        ("ddp", {"log_every_n_steps": 1}),
        ("ddp", {"max_time": "1 min"}),
        ("ddp", {"check": True}),
        ("ddp", {"gc_every_n_steps": 1}),
        ("fsdp", {"timeout": "1 min"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_comes_between_two_steps_is_no_part_of_a_step(strategy: str, settings: dict[str, Any]) -> None:
    assert traced(strategy, **settings) == traced(strategy)


def test_a_window_has_the_documented_phases() -> None:
    """Between two micro-batches nothing is set up."""
    phases = [moment.phase for moment in traced(accumulate_grad_batches=3).timeline]
    assert set(phases) == {"start", "forward", "backward", "optimizer step", "end"}


def test_a_callback_that_ends_the_epoch_is_named() -> None:
    class Ends(Callback):
        def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> int:
            return -1

    assert traced(callbacks=Ends()).missing == ("the plan ends where on_train_batch_start ends the epoch",)
