"""What the job trains: shuffled samples, dropout, windows of two micro-batches, a schedule, and what its recipe says."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from recipes import STEPS, Recipe
from torch import nn
from torch.utils.data import DataLoader, Dataset
from watch import Watch, complete

from callbacks import BatchValidation, CSVLogger, ModelCheckpoint
from engine import Callback, Fit, TrainModule

SAMPLES = 61
"""Of the data."""


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
    """The plain model with AdamW. Others override :meth:`build`, :meth:`features` or :meth:`optimizers`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.watch = watch
        self.build()

    def build(self) -> None:
        """Make the layers."""
        self.blocks_ = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.ReLU()), nn.Sequential(nn.Linear(12, 8), nn.ReLU())]
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)

    def blocks(self) -> list[nn.Module]:
        return list(self.blocks_)

    def features(self, x: Any) -> Any:
        """What the output layer gets, before dropout."""
        for block in self.blocks_:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Any:
        _, x, y = batch
        return nn.functional.cross_entropy(self.head(self.drop(self.features(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.watch.event("steps", "forward")
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.watch.event("validation", "batch")
        self.log("val_loss", self.loss(batch))

    def make_optimizers(self) -> list[Any]:
        """The optimizers of all trained parameters."""
        return [torch.optim.AdamW(self.parameters(), lr=0.02)]

    def configure_optimizers(self) -> Any:
        optimizers = self.make_optimizers()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.watch.event("steps", "before optimizer.step"))
            optimizer.register_step_post_hook(lambda *_: self.watch.event("steps", "after optimizer.step"))
        return optimizers, [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97), "interval": "step"}
            for optimizer in optimizers
        ]


class Diary(Callback):
    """A line at the start: from which step, and which checkpoint was the newest. One a step: its samples, and the weights after it, on this rank."""

    def __init__(self, watch: Watch, place: Path) -> None:
        self.watch, self.place = watch, place

    def setup(self, run: Any, module: Any, stage: str) -> None:
        self.watch.event("start", "setup")

    def on_fit_start(self, run: Any, module: Any) -> None:
        self.watch.event("start", "fit start")

    def on_train_start(self, run: Any, module: Any) -> None:
        self.ids: list[int] = []
        self.step = run.step
        self.file = (self.place / f"{self.watch.attempt}.{run.rank}").open("x", buffering=1)
        self.write({"begin": run.step, "newest": self.watch.newest})
        self.watch.begun()

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.engine.window.share.size:
            self.ids += batch[0].tolist()
        if run.step != self.step:
            self.step = run.step
            self.write(
                {"step": run.step, "ids": self.ids, "weights": weights(module), "complete": complete(self.watch.root)}
            )
            self.ids = []
        self.watch.event("steps", "batch end")

    def on_validation_start(self, run: Any, module: Any) -> None:
        self.watch.event("validation", "start")

    def on_validation_epoch_end(self, run: Any, module: Any) -> None:
        self.watch.event("validation", "epoch end")

    def on_validation_end(self, run: Any, module: Any) -> None:
        self.watch.event("validation", "end")

    def on_train_end(self, run: Any, module: Any) -> None:
        self.watch.ending()

    def teardown(self, run: Any, module: Any, stage: str) -> None:
        self.watch.event("end", "teardown")

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")


def weights(module: nn.Module) -> int:
    """A checksum of what this rank has of the parameters."""
    found = 0
    for parameter in module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found = zlib.crc32(local.detach().numpy().tobytes(), found)
    return found


class Stops(Callback):
    """The last rank asks to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == self.step and run.rank == run.world_size - 1:
            run.stop("enough")


def step_of(checkpoint: Any) -> int | None:
    """The step in a checkpoint's manifest."""
    return None if checkpoint is None else json.loads((checkpoint / "manifest.json").read_text())["counters"]["step"]


def run(watch: Watch, module: Net, recipe: Recipe, strategy: str, devices: int, diaries: Path) -> None:
    """Train ``module`` to its end; it continues from what is there."""
    callbacks: list[Callback] = [Diary(watch, diaries), CSVLogger()]
    callbacks += [ModelCheckpoint(every, monitor, save_top_k=count) for every, monitor, count in recipe.saves]
    if recipe.batches is not None:
        callbacks.append(BatchValidation(recipe.batches))
    if recipe.stop is not None:
        callbacks.append(Stops(recipe.stop[0]))
    fit = Fit(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        root_dir=watch.root,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        min_steps=None if recipe.stop is None else recipe.stop[1],
        val_every=recipe.val_every,
        log_every_n_steps=1,
        seed=3,
        callbacks=callbacks,
    )
    alone = devices == 1
    loader = DataLoader(Numbered(), batch_size=4, shuffle=True, num_workers=int(alone), persistent_workers=alone)
    result = fit.run(module, loader, DataLoader(Numbered(), batch_size=16), resume="auto")
    if watch.rank == 0:
        outcome = {
            "metrics": result.metrics,
            "end": result.stop_reason,
            "best": step_of(result.best_checkpoint),
            "last": step_of(result.last_checkpoint),
        }
        (watch.root.parent / "outcome.json").write_text(json.dumps(outcome))
