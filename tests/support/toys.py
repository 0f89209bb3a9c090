"""Modules whose numbers can be worked out by hand, and a ``Fit`` on one CPU process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import Callback, Fit, TrainModule
from support.ranks import PATIENCE_S, run_ranks


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


def on_ranks(function: Callable[..., Any], world_size: int, *args: object, timeout: float = PATIENCE_S) -> list[Any]:
    """What ``function``, which stands at the top of a test file, gives on each of the ranks of a real job. ``args`` arrive as text."""
    folders = [str(Path(__file__).parents[1]), str(Path(function.__code__.co_filename).parent)]
    lines = (
        f"import sys; sys.path[:0] = {folders!r}",
        f"import {function.__module__} as tests; from support import ranked",
        f"report(tests.{function.__name__}(*sys.argv[1:]))",
        "ranked.leave()",
    )
    return [ran.value for ran in run_ranks("\n".join(lines), world_size, *args, timeout=timeout)]
