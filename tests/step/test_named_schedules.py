"""Schedules by name: their rates by hand, over the steps of a run, under a resume, and their errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import nn

from callbacks import ModelCheckpoint
from engine import Engine, lr_schedule

COSINE_HALF = 0.5 * (1 + math.cos(math.pi / 4))


class Scheduled(Weight):
    """Trains with one of the schedules, and notes the rate of each step."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name, self.options, self.rates = name, options, []  # type: ignore[var-annotated]
        self.fast = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.w]}, {"params": [self.fast], "lr": 20.0}]
        optimizer = torch.optim.SGD(groups, lr=2.0)
        schedule = lr_schedule(optimizer, self.name, total_steps=self.run.total_steps, **self.options)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize(
    ("name", "options", "factors"),
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
        ("constant", {"warmup": 4}, [0, 0.25, 0.5, 0.75, 1, 1]),
        ("constant", {"warmup": 0.3}, [0, 0.5, 1, 1, 1, 1]),  # 1.8 steps, rounded up
        ("linear", {}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", {"warmup": 2, "min_lr_factor": 0.2}, [0, 0.5, 1, 0.8, 0.6, 0.4]),
        ("cosine", {"warmup": 2}, [0, 0.5, 1, COSINE_HALF, 0.5, 1 - COSINE_HALF]),
        ("cosine", {"warmup": 2, "min_lr_factor": 0.5}, [0, 0.5, 1, (1 + COSINE_HALF) / 2, 0.75, 1 - COSINE_HALF / 2]),
    ],
)
def test_the_rates_of_a_run_of_six_steps(
    name: str, options: dict[str, Any], factors: list[float], tmp_path: Path
) -> None:
    module = Scheduled(name, **options)
    fit(tmp_path, max_epochs=2, accumulate_grad_batches=2).run(module, ones(6))
    rates = [rate for step, rate in enumerate(module.rates) if step % 2 == 0]
    assert rates == [pytest.approx([2.0 * factor, 20.0 * factor]) for factor in factors]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_its_last_step_a_schedule_stays_at_its_end(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_schedule(optimizer, name, total_steps=4, min_lr_factor=0.1)["scheduler"]
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_resumed_run_has_the_rates_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, first, rest = (Scheduled("cosine", warmup=2) for _ in range(3))
    fit(tmp_path / "whole", max_epochs=2).run(whole, ones(3))
    fit(tmp_path, max_epochs=2, callbacks=[ModelCheckpoint(every=2, save_top_k=-1)]).run(first, ones(3))
    fit(tmp_path, max_epochs=2).run(rest, ones(3), resume=tmp_path / "checkpoints" / "step=00000004")
    assert first.rates == whole.rates
    assert rest.rates == whole.rates[4:]


def test_in_a_loop_of_your_own_its_scheduler_is_prepared() -> None:
    engine, model = Engine(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    entry = lr_schedule(optimizer, "linear", warmup=2, total_steps=4)
    with pytest.raises(TypeError, match=r"give the scheduler in it, entry\['scheduler'\]"):
        engine.prepare(entry)
    model, optimizer, scheduler = engine.prepare(model, optimizer, entry["scheduler"])
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        engine.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    assert rates == [0.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "cosin"}, "did you mean 'cosine'"),
        ({"name": "constant_with_warmup"}, "possible: constant, linear, cosine"),
        ({"total_steps": None}, r"max_steps="),
        ({"name": "constant", "warmup": 0.5, "total_steps": None}, "max_steps="),
        ({"total_steps": 2.5}, "a number of optimizer steps"),
        ({"total_steps": True}, "a number of optimizer steps"),
        ({"warmup": 1.5}, "warmup=1.5 must be"),
        ({"warmup": 1.0}, "warmup=1.0 must be"),
        ({"warmup": -1}, "warmup=-1 must be"),
        ({"warmup": True}, "warmup=True must be"),
        ({"warmup": float("nan")}, "warmup=nan must be"),
        ({"min_lr_factor": 1.1}, "from 0 to 1"),
        ({"name": "constant", "min_lr_factor": 0.1}, "no lower end"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=said):
        lr_schedule(optimizer, **{"total_steps": 10, **arguments})


def test_a_warm_up_that_is_longer_than_the_training_is_told(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    lr_schedule(optimizer, "linear", warmup=9, total_steps=10)
    lr_schedule(optimizer, "linear", warmup=0.99, total_steps=1)
    assert not caplog.records
    lr_schedule(optimizer, "linear", warmup=12, total_steps=10)
    assert "warmup=12: the training has 10 optimizer step(s)" in caplog.text
