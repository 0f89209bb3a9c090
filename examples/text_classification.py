"""Which package is a piece of source code from? A classifier of text, measured with torchmetrics.

    python examples/text_classification.py
    python examples/text_classification.py --devices 2

The texts are pieces of the sources of Python's standard library, which every machine with Python has. Names that a piece shares with its
package give it away, so that a bag of words does well; pieces of the files kept for validation share fewer.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from callbacks import ModelCheckpoint, RichProgressBar
from engine import DataModule, Fit, TrainModule

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
LINES, WORDS = 12, 1 << 13
"""Lines of a piece, and rows of the table of words."""

Piece = tuple[list[int], int]
"""Words, as numbers below ``WORDS``, and the number of the package."""


def words(text: str) -> list[int]:
    """Each word as its hash, which unlike Python's own is the same in each process."""
    return [zlib.crc32(word.encode()) % WORDS for word in re.findall(r"[A-Za-z]+|[^\sA-Za-z]", text)]


class Sources(DataModule):
    """Pieces of 12 lines; every fifth file of a package is for validation."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train: list[Piece] = []
        self.val: list[Piece] = []
        for label, package in enumerate(PACKAGES):
            files = sorted((Path(os.__file__).parent / package).rglob("*.py"))
            for number, file in enumerate(each for each in files if "test" not in each.parts):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                pieces = ("\n".join(lines[start : start + LINES]) for start in range(0, len(lines), LINES))
                found = [(words(piece), label) for piece in pieces if len(piece) > 100]
                (self.val if number % 5 == 0 else self.train).extend(found)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, collate_fn=collated)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=256, collate_fn=collated)


def collated(pieces: list[Piece]) -> tuple[Tensor, Tensor, Tensor]:
    """All words of the batch in a row [N], where each piece begins [B], and the labels [B]."""
    lengths = torch.tensor([0, *(len(found) for found, _ in pieces)])
    flat = torch.tensor([word for found, _ in pieces for word in found])
    return flat, lengths.cumsum(0)[:-1], torch.tensor([label for _, label in pieces])


class Classifier(TrainModule):
    """The mean of the words' vectors, and a linear layer: words [N] and beginnings [B] to logits [B, packages]."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, len(PACKAGES)))
        self.accuracy = MulticlassAccuracy(len(PACKAGES), average="micro")
        self.f1 = MulticlassF1Score(len(PACKAGES), average="macro")

    def forward(self, flat: Tensor, starts: Tensor) -> Tensor:
        return self.head(self.words(flat, starts))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        flat, starts, labels = batch
        loss = F.cross_entropy(self(flat, starts), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        flat, starts, labels = batch
        logits = self(flat, starts)
        self.log("val/loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        for name, metric in (("accuracy", self.accuracy), ("f1", self.f1)):
            metric.update(logits, labels)
            self.log(f"val/{name}", metric, prog_bar=True)  # computed over all batches and ranks at the end, and reset

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which package a piece of source code is from.")
    parser.add_argument("--devices", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--max-epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    fit = Fit(
        devices=args.devices,
        accelerator="cpu",
        max_epochs=args.max_epochs,
        seed=1,
        root_dir="runs/text_classification",
        callbacks=[RichProgressBar(), ModelCheckpoint(every="1 epochs", monitor="val/f1", mode="max")],
    )
    module, data = Classifier(width=64, lr=3e-3), Sources(args.batch_size)
    result = fit.run(module, datamodule=data)
    metrics = fit.validate(module, datamodule=data, checkpoint=result.best_checkpoint)[0]
    if fit.is_main_process:
        print(f"best checkpoint: {result.best_checkpoint}")
        print(f"accuracy: {metrics['val/accuracy']:.2%}, F1: {metrics['val/f1']:.2%}")


if __name__ == "__main__":
    main()
