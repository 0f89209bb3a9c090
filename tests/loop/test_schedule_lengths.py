"""A schedule with a length in a run that is continued for more epochs: told, and with ``hyperparameters="configured"`` that of a longer run."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from callbacks import ModelCheckpoint
from engine import Resume, lr_schedule

STEPS = 3
"""Steps of an epoch."""


class Halves:
    """A function with a state, which checkpoints have."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return 0.5 ** (4 * step / self.total)


class Own(LRScheduler):
    """A schedule of the user's."""

    def __init__(self, optimizer: Any, total: int) -> None:
        self.total = total
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * max(0.0, 1 - self.last_epoch / self.total) for base in self.base_lrs]


def cosine(step: int, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step, total) / total))


def joined(optimizer: Any, total: int) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, 1.0, 2), schedules.CosineAnnealingLR(optimizer, total - 2)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: Any, total: int) -> Any:
    return schedules.ChainedScheduler(
        [schedules.PolynomialLR(optimizer, total), schedules.ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    )


SCHEDULES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "cosine": (schedules.CosineAnnealingLR, "CosineAnnealingLR: T_max=6 (configured: 12)"),
    "polynomial": (schedules.PolynomialLR, "PolynomialLR: total_iters=6 (configured: 12)"),
    "linear": (lambda o, n: schedules.LinearLR(o, 1.0, 0.0, n), "LinearLR: total_iters=6 (configured: 12)"),
    "steps": (lambda o, n: schedules.MultiStepLR(o, [n // 3, n // 2]), "milestones=[2, 3] (configured: [4, 6])"),
    "restarts": (schedules.CosineAnnealingWarmRestarts, "CosineAnnealingWarmRestarts: T_0=6 (configured: 12)"),
    "joined": (joined, "CosineAnnealingLR: T_max=4 (configured: 10)"),
    "chained": (chained, "PolynomialLR: total_iters=6 (configured: 12)"),
    "object": (lambda o, n: schedules.LambdaLR(o, Halves(n)), "LambdaLR: total=6 (configured: 12)"),
    "own": (Own, "Own: total=6 (configured: 12)"),
    "function": (
        lambda o, n: schedules.LambdaLR(o, lambda step: cosine(step, n)),
        "the functions of LambdaLR are those of configure_optimizers, because a checkpoint has none, and give lr=0.5 at its step 6",
    ),
    "partial": (
        lambda o, n: schedules.LambdaLR(o, functools.partial(cosine, total=n)),
        "the functions of LambdaLR are those of configure_optimizers",
    ),
    "named": (
        lambda o, n: lr_schedule(o, "cosine", total_steps=n)["scheduler"],
        "the length and warm-up of lr_schedule are those of configure_optimizers, because a checkpoint has none, and give lr=0.5 at its step 6",
    ),
    "one cycle": (lambda o, n: schedules.OneCycleLR(o, 1.0, n), "total_steps=6, behind which it cannot step"),
}


class Scheduled(Weight):
    """Its schedule is as long as the run; ``rates`` has the learning rate and the momentum of each step."""

    def __init__(self, schedule: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.schedule, self.rates = schedule, []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        group = self.optimizers().param_groups[0]
        self.rates.append((group["lr"], group["momentum"]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        schedule = self.schedule(optimizer, self.run.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rates_of(root: Path, schedule: Callable[[Any, int], Any], epochs: int, resume: Any = None) -> list[Any]:
    module = Scheduled(schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in .scheduler.step", UserWarning)
        fit(root, max_epochs=epochs, callbacks=[ModelCheckpoint(save_top_k=-1)]).run(module, ones(STEPS), resume=resume)
    return module.rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_that_is_continued_for_longer(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule, text = SCHEDULES[name]
    longer = rates_of(tmp_path / "longer", schedule, 4)
    rates_of(tmp_path, schedule, 2)
    path = str(tmp_path / "checkpoints" / "step=00000006")
    assert rates_of(tmp_path / "again", schedule, 4, Resume(path, hyperparameters="configured")) == longer[6:]
    assert "configured: " not in caplog.text
    if name == "one cycle":
        with pytest.raises(ValueError, match=f"{text}.*total_steps=12 is configured.*hyperparameters='configured'"):
            rates_of(tmp_path / "saved", schedule, 4, path)
        return
    rates_of(tmp_path / "saved", schedule, 4, path)
    assert text in caplog.text
    assert f"Resume({path!r}, hyperparameters='configured')" in caplog.text
    caplog.clear()
    rates_of(tmp_path / "middle", schedule, 2, str(tmp_path / "checkpoints" / "step=00000003"))
    assert "configured: " not in caplog.text
    assert "functions of" not in caplog.text


def test_a_schedule_of_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Epochs(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
            return [optimizer], [schedules.CosineAnnealingLR(optimizer, self.run.max_epochs)]  # type: ignore[arg-type]

    whole, saved, configured = (Epochs(schedules.PolynomialLR) for _ in range(3))
    fit(tmp_path / "whole", max_epochs=4).run(whole, ones(STEPS))
    fit(tmp_path, max_epochs=2, callbacks=[ModelCheckpoint()]).run(Epochs(schedules.PolynomialLR), ones(STEPS))
    path = str(tmp_path / "checkpoints" / "step=00000006")
    fit(tmp_path / "a", max_epochs=4).run(configured, ones(STEPS), resume=Resume(path, hyperparameters="configured"))
    assert "configured: " not in caplog.text
    assert configured.rates == whole.rates[6:]
    fit(tmp_path / "b", max_epochs=4).run(saved, ones(STEPS), resume=path)
    assert "CosineAnnealingLR: T_max=2 (configured: 4)" in caplog.text


def test_a_length_that_is_unknown_for_several_schedules_is_an_error(tmp_path: Path) -> None:
    class Two(Scheduled):
        def configure_optimizers(self) -> Any:
            configuration = super().configure_optimizers()
            optimizer = configuration["optimizer"]
            return [optimizer], [configuration["lr_scheduler"], schedules.ExponentialLR(optimizer, 0.5)]

    fit(tmp_path, max_epochs=2, callbacks=[ModelCheckpoint()]).run(Two(schedules.PolynomialLR), ones(STEPS))
    resume = Resume("last", hyperparameters="configured")
    with pytest.raises(ValueError, match="another scheduler changes the rates of the same optimizer"):
        fit(tmp_path, max_epochs=4).run(Two(schedules.PolynomialLR), ones(STEPS), resume=resume)
