"""Fine-tuning a frozen backbone: a network that knows the digits 0 to 4 learns 5 to 9 from 40 images of each.

    python examples/finetune.py
    python examples/finetune.py --unfreeze-at 1 --devices 2

First only the new head is trained, then the backbone as well, with a tenth of its learning rate. Validation, the test and the exported weights
are those of an exponential moving average. Needs scikit-learn, which has the images: ``pip install fit-trainer[examples]``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, BackboneFinetuning, LearningRateMonitor, ModelCheckpoint
from engine import Fit, TrainModule, seed_everything
from engine.checkpoint.export import export_checkpoint


class Classifier(TrainModule):
    """Images [B, 1, 8, 8] to logits [B, 5]: a convolutional backbone, and a head."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(64 * 4 * 4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(dim=1) == labels).float().mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def digits(first: int, train: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of five digits from ``first`` on: ``train`` images to train, the others to test."""
    pixels, labels = load_digits(return_X_y=True)
    chosen = (labels >= first) & (labels < first + 5)
    images = torch.tensor(pixels[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16.0
    targets = torch.tensor(labels[chosen] - first)
    parts = (TensorDataset(images[part], targets[part]) for part in (slice(train), slice(train, None)))
    return tuple(DataLoader(part, batch_size=20, shuffle=i == 0) for i, part in enumerate(parts))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tuning of a frozen backbone.")
    parser.add_argument("--devices", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--max-epochs", type=int, default=6)
    parser.add_argument("--unfreeze-at", type=int, default=3, help="the first epoch that trains the backbone")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--root-dir", default="runs/finetune")
    args = parser.parse_args()
    common: dict[str, Any] = {"accelerator": "cpu", "devices": args.devices, "seed": 1}

    seed_everything(1)
    pretrained = Classifier(args.lr)
    train, test = digits(0, 700)
    Fit(max_epochs=3, root_dir=Path(args.root_dir) / "pretrained", **common).run(pretrained, train)

    module = Classifier(args.lr)
    module.backbone.load_state_dict(pretrained.backbone.state_dict())
    train, test = digits(5, 200)
    callbacks = [
        BackboneFinetuning(args.unfreeze_at, train_bn=False),
        EMA(0.9),
        LearningRateMonitor(),
        ModelCheckpoint(every="1 epochs", monitor="accuracy", mode="max"),
    ]
    fit = Fit(max_epochs=args.max_epochs, callbacks=callbacks, root_dir=args.root_dir, **common)
    result = fit.run(module, train, test)

    best = result.best_checkpoint
    metrics = fit.test(Classifier(args.lr), test, checkpoint=best, weights="ema")[0]
    if fit.is_main_process and best is not None:
        files = export_checkpoint(best, Path(str(result.folder)) / "exported", weights="ema").files
        print(f"best checkpoint: {best}; exported: {files[0]}")
        print(f"test accuracy: {metrics['accuracy']:.2%}")


if __name__ == "__main__":
    main()
