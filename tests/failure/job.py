"""A training whose every step is written down, to be killed and resumed: shuffling, dropout, workers, a scheduler, windows and metrics."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from callbacks import ModelCheckpoint
from engine import Callback, Fit, TrainModule

SAMPLES = 61


class Numbered(Dataset[Any]):
    """Samples that say which they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = (
            torch.randn(SAMPLES, 8, generator=generator),
            torch.randint(0, 3, (SAMPLES,), generator=generator),
        )

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Net(TrainModule):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks_ = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Sequential(nn.Linear(12, 8), nn.ReLU())]
        )
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, 3)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def blocks(self) -> list[nn.Module]:
        return list(self.blocks_)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"blocks_.0.0": "colwise", "blocks_.1.0": "rowwise"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, x, y = batch
        for block in self.blocks_:
            x = block(x)
        logits = self.head(self.drop(x))
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits.detach(), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, x, y = batch
        for block in self.blocks_:
            x = block(x)
        self.log("val_loss", nn.functional.cross_entropy(self.head(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}]


class Diary(Callback):
    """One JSON line for each optimizer step: epoch, step, the ids of this rank's samples, the step's loss over all ranks."""

    def __init__(self, path: Path) -> None:
        self.path, self.ids = path, []

    def on_train_start(self, run: Any, module: Any) -> None:
        self.ids, self.step = [], run.step

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.engine.window.share.size:
            self.ids += batch[0].tolist()

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if "loss_step" in metrics:
            line = {"epoch": run.epoch, "step": step, "ids": self.ids, "loss": metrics["loss_step"]}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.ids = []


class Die(Callback):
    """This rank is killed in the middle of the window after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if run.step == self.step and run.engine.window.share.last is False:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    root: Path,
    diary: Path,
    *,
    resume: Any = "auto",
    dropout: float = 0.3,
    workers: int = 2,
    batch_size: int = 4,
    die_at: int = -1,
    **settings: Any,
) -> dict[str, float]:
    """Run it to its end; the last values of all metrics."""
    callbacks = [Diary(diary), ModelCheckpoint(every=1, save_top_k=3), Die(die_at)]
    given: dict[str, Any] = {
        "max_epochs": 4,
        "log_every_n_steps": 1,
        "seed": 3,
        "accelerator": "cpu",
        "root_dir": root,
        "callbacks": callbacks,
    }
    if "global_batch_size" not in settings:
        given["accumulate_grad_batches"] = 3
    loader = DataLoader(
        Numbered(), batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return (
        Fit(**given | settings).run(Net(dropout), loader, DataLoader(Numbered(), batch_size=16), resume=resume).metrics
    )


def read_diary(path: Path) -> list[dict[str, Any]]:
    """Its whole lines; the last one may have been cut by a kill."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
