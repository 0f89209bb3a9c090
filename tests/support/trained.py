"""Checkpoints for tests, as runs write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import Callback, Fit, TrainModule


class Tied(TrainModule):
    """A linear model of 6 to 4 to 6 features whose output is tied to its input; the loss is the mean of its squares."""

    def __init__(self, width: int = 4, *, scale: float = 1.0, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.ModuleDict(
            {"embed": nn.Linear(6, width, bias=False), "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 6)}
        )
        self.model["up"] = nn.Linear(6, width, bias=False)
        self.model["up"].weight = self.model["embed"].weight
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model["head"](self.model["norm"](self.model["embed"](x) + self.model["up"](x))) * self.scale
        return y

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


class Saves(Callback):
    """Saves at the training's end, or after the steps that ``scores`` has, under ``prefix`` and the step's number."""

    def __init__(self, name: str | None = None, scores: dict[int, float] | None = None) -> None:
        self.name, self.scores = name, scores or {}

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step in self.scores:
            run.save_checkpoint(score={"monitor": "val", "mode": "min", "value": self.scores[run.step]})

    def on_train_end(self, run: Any, module: Any) -> None:
        if not self.scores:
            run.save_checkpoint(self.name)


def batches(count: int = 2) -> list[Tensor]:
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def save(root: Path | str, module: TrainModule, data: Sequence[Any] | None = None, **settings: Any) -> Path:
    """Train and save; the checkpoint's directory."""
    scores, name = settings.pop("scores", None), settings.pop("name", None)
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "root_dir": root,
        "callbacks": Saves(name, scores),
        "seed": 1,
    }
    result = Fit(**{**defaults, **settings}).run(module, batches() if data is None else data)
    assert result.folder is not None
    return sorted((result.folder / "checkpoints").iterdir())[-1]


def on_two_ranks(root: str, strategy: str = "fsdp") -> None:
    """One step of :class:`Tied` on each rank of a job, saved in ``root``."""
    torch.manual_seed(0)
    save(root, Tied(scale=2.0), batches(4), devices="auto", strategy=strategy, max_steps=1)
