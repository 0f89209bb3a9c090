"""The same project under Lightning and under ``engine.interop.lightning``: modules, callbacks, runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import engine.interop.lightning as ours

THEIRS = SimpleNamespace(
    LightningModule=lightning.LightningModule,
    LightningDataModule=lightning.LightningDataModule,
    Trainer=lightning.Trainer,
    Callback=lightning.Callback,
    callbacks=lightning.pytorch.callbacks,
    loggers=lightning.pytorch.loggers,
    seed_everything=lightning.seed_everything,
)
OURS: Any = ours
EVENTS = (
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_test_start", "on_test_end", "on_test_epoch_start", "on_test_epoch_end", "on_test_batch_start"),
    *("on_test_batch_end", "on_predict_start", "on_predict_end", "on_predict_batch_start", "on_predict_batch_end"),
)


def data(samples: int = 40, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)


def module(L: Any, automatic: bool = True) -> Any:
    """A new module of a class that is made for ``L``; it remembers its events in ``seen``."""

    class Net(L.LightningModule):
        def __init__(self, width: int = 5, lr: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
            self.automatic_optimization = automatic
            self.seen: list[str] = []

        def loss(self, batch: Any) -> Any:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    for event in EVENTS:
        if "sanity" not in event:  # callbacks have it alone
            setattr(Net, event, _noting(event))
    torch.manual_seed(7)
    return Net()


def _noting(event: str) -> Any:
    def hook(self: Any, *args: Any) -> None:
        self.seen.append(event)

    return hook


def watcher(L: Any) -> Any:
    """A callback that remembers its events, with the trainer's counters."""

    def noting(event: str) -> Any:
        def hook(self: Any, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.seen.append((event, trainer.current_epoch, trainer.global_step))

        return hook

    Watcher = type("Watcher", (L.Callback,), {event: noting(event) for event in EVENTS})
    made = Watcher()
    made.seen = []
    return made


def trainer(L: Any, folder: Path, **options: Any) -> Any:
    """A quiet trainer on the CPU."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(accelerator="cpu", default_root_dir=folder, **quiet | options)


def quietly(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Lightning warns about small loaders and torch's deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])
