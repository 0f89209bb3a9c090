"""Handwritten digits on two CPU processes: about 99 % of the test images are recognised.

    python examples/digits.py                   # two processes, started by this one
    python examples/digits.py --devices 1
    torchrun --nproc-per-node 2 examples/digits.py
    python examples/digits.py --resume          # continues from the last checkpoint under --root-dir

Needs scikit-learn, which has the images: ``pip install fit-trainer[examples]``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import CSVLogger, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from engine import DataModule, Fit, TrainModule, seed_everything


class DigitsData(DataModule):
    """1797 images of 8 x 8 pixels: 1257 to train, 270 to choose the checkpoint, 270 to test; the same split each time."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
        data = TensorDataset(images, torch.tensor(labels, dtype=torch.long))
        self.train, self.val, self.test = random_split(
            data, [1257, 270, 270], generator=torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=128)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=128)


class Digits(TrainModule):
    """A small convolutional network: images [B, 1, 8, 8] to logits [B, 10]."""

    def __init__(self, lr: float, max_epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams.max_epochs)]

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{stage}/loss", F.cross_entropy(logits, labels))
        self.log(f"{stage}/accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=stage == "val")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Handwritten digits: data parallel training with validation, checkpoints and resuming."
    )
    parser.add_argument("--devices", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda or auto (default: cpu)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a micro-batch on each process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root-dir", default="runs/digits", help="checkpoints and metrics.csv go here")
    parser.add_argument(
        "--resume", nargs="?", const="last", help="a checkpoint folder; without a value the last one under --root-dir"
    )
    args = parser.parse_args()

    fit = Fit(
        devices=args.devices,
        accelerator=args.accelerator,
        precision=args.precision,
        max_epochs=args.max_epochs,
        seed=args.seed,
        root_dir=args.root_dir,
        log_every_n_steps=10,
        callbacks=[
            RichProgressBar(),
            CSVLogger(),
            LearningRateMonitor(),
            ModelCheckpoint(every="1 epochs", monitor="val/accuracy", mode="max"),
        ],
    )
    seed_everything(args.seed)  # the first weights are drawn before the run starts
    module, data = Digits(args.lr, args.max_epochs), DigitsData(args.batch_size)
    result = fit.run(module, datamodule=data, resume=args.resume)

    metrics = fit.test(module, datamodule=data, checkpoint=result.best_checkpoint)[0]
    if fit.is_main_process:  # every process comes here
        print(
            f"{result.status} after {result.epoch} epochs, {result.step} steps; best checkpoint: {result.best_checkpoint}"
        )
        print(f"test accuracy: {metrics['test/accuracy']:.2%}")


if __name__ == "__main__":
    main()
