"""A training of 8 steps with many loggers that a SIGKILL may end, and the evaluations of its last checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from support.toys import Weight, ones

import callbacks
from callbacks import ModelCheckpoint
from engine import Callback, Fit


class Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", float(self.global_step) / 8)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/loss", self.w.detach()[0] * 0 + 0.5)

    def on_validation_epoch_end(self) -> None:
        if self.run.stage == "fit" and self.run.step == 2:
            self.log_image("gray", torch.full((1, 2, 3), 0.5))
            self.log_histogram("spread", torch.arange(4.0))
            self.log_text("note", "a word")
            self.log_audio("tone", torch.zeros(2, 10), 100)
            self.log_table("pairs", ["a", "b"], [[1, "x"], [2.5, None]])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test/loss", 0.25)


class Kills(Callback):
    """Ends the process at this step, when all is sent."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if step == self.step and "train/loss" in metrics:
            while any(logger._sender.waiting() for logger in run.loggers):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, kill: int, names: str, server: str, **settings: Any) -> str:
    """The run's folder. ``names``: of loggers; ``server``: MLflow's."""
    os.environ["TRACKIO_DIR"] = str(root / "trackio")
    os.environ["WANDB_SILENT"] = "true"
    options = {
        "MLflowLogger": {"tracking_uri": server, "artifact_location": str(root / "artifacts")},
        "WandbLogger": {"project": "p", "mode": "offline"},
        "AimLogger": {"repo": root / "aim"},
    }
    loggers = [getattr(callbacks, name)(**options.get(name, {})) for name in names.split(",")]
    module = Logs()
    fit = Fit(
        accelerator="cpu",
        num_sanity_val_steps=0,
        root_dir=root,
        max_steps=8,
        log_every_n_steps=1,
        val_every="2 steps",
        callbacks=[*loggers, Kills(kill), ModelCheckpoint(every="3 steps", asynchronous=False)],
        **settings,
    )
    result = fit.run(module, ones(32), ones(2), resume="auto")
    fit.validate(module, ones(2), checkpoint=result.last_checkpoint)
    fit.test(module, ones(2), checkpoint=result.last_checkpoint)
    return str(result.folder)
