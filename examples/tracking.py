"""Handwritten digits with TensorBoard and MLflow: curves, images and hyperparameters.

    python examples/tracking.py                       # then: tensorboard --logdir runs/tracking
    python examples/tracking.py --tracker mlflow      # then: mlflow ui --backend-store-uri sqlite:///mlflow.db
    python examples/tracking.py --tracker mlflow --tracking-uri http://127.0.0.1:5000
    python examples/tracking.py --resume              # the same run in the tracker, nothing twice

Needs scikit-learn, which has the images, and the tracker: ``pip install fit-trainer[examples] tensorboard mlflow``.
"""

from __future__ import annotations

import argparse

import torch
from digits import Digits, DigitsData
from torch import Tensor

from callbacks import CSVLogger, LearningRateMonitor, MLflowLogger, ModelCheckpoint, TensorBoardLogger
from engine import Fit, seed_everything


class TrackedDigits(Digits):
    """Logs the test images that it recognises worst, and its weights."""

    def __init__(self, lr: float, max_epochs: int) -> None:
        super().__init__(lr, max_epochs)
        self.worst: list[tuple[float, Tensor]] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        images, labels = batch
        sure = self(images).softmax(dim=1).gather(1, labels[:, None])[:, 0]
        least = int(sure.argmin())
        self.worst.append((float(sure[least]), images[least]))

    def on_validation_epoch_end(self) -> None:
        self.log_image("val/worst", torch.stack([image for _, image in self.worst]))
        self.log_histogram("weights/first", self.net[0].weight)
        self.log_table(
            "val/worst images", ["batch", "probability"], [[i, sure] for i, (sure, _) in enumerate(self.worst)]
        )
        self.worst.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits, followed in TensorBoard or MLflow.")
    parser.add_argument("--tracker", choices=("tensorboard", "mlflow"), default="tensorboard")
    parser.add_argument("--tracking-uri", default="sqlite:///mlflow.db", help="of MLflow: a server or a database")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--root-dir", default="runs/tracking")
    parser.add_argument("--resume", nargs="?", const="last")
    args = parser.parse_args()

    if args.tracker == "mlflow":
        logger = MLflowLogger("digits", tracking_uri=args.tracking_uri)
    else:
        logger = TensorBoardLogger()
    fit = Fit(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.max_epochs,
        seed=1,
        root_dir=args.root_dir,
        log_every_n_steps=10,
        callbacks=[logger, CSVLogger(), LearningRateMonitor(), ModelCheckpoint()],
    )
    seed_everything(1)
    module = TrackedDigits(4e-3, args.max_epochs)
    result = fit.run(module, datamodule=DigitsData(32), resume=args.resume)
    if fit.is_main_process:
        print(f"{result.status} at step {result.step}: validation accuracy {result.metrics['val/accuracy']:.2%}")


if __name__ == "__main__":
    main()
