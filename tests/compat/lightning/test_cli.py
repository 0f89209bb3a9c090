"""``LightningCLI``, and Lightning's paths of submodules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from both import OURS, data
from torch import nn, optim

from engine.interop.lightning.cli import LightningCLI


class Net(OURS.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(OURS.LightningDataModule):  # type: ignore[misc]
    def __init__(self, samples: int = 8) -> None:
        super().__init__()
        self.samples = samples

    def train_dataloader(self) -> Any:
        return data(self.samples)


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.samples", "model.width")

    def after_fit(self) -> None:
        self.done = self.trainer.global_step


def test_a_training_from_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {lr: 0.2}\ndata: {samples: 12}\ntrainer: {max_epochs: 2, accelerator: cpu}\n")
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false"]
    monitor = "--trainer.callbacks+=engine.interop.lightning.callbacks.LearningRateMonitor"
    cli = Linked(
        Net, Data, trainer_defaults={"default_root_dir": str(tmp_path)},
        args=["fit", f"--config={config}", *quiet, monitor, "--trainer.max_epochs=3"],
    )  # fmt: skip
    assert dict(cli.model.hparams) == {"width": 12, "lr": 0.2}
    assert (cli.done, cli.trainer.current_epoch) == (9, 3)
    assert type(cli.trainer.callbacks[0]).__name__ == "LearningRateMonitor"


def test_objects_alone(tmp_path: Path) -> None:
    cli = LightningCLI(Net, Data, args=["--model.width=7", f"--trainer.default_root_dir={tmp_path}"], run=False)
    assert (cli.model.hparams.width, cli.datamodule.samples, cli.trainer.max_epochs) == (7, 8, 1000)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "callbacks.early_stopping.EarlyStopping",
            "utilities.types.STEP_OUTPUT",
            "utilities.rank_zero.rank_zero_only",
        ),
        *(
            "trainer.states.RunningStage",
            "core.module.LightningModule",
            "pytorch.loggers.tensorboard.TensorBoardLogger",
        ),
    ],
)
def test_paths_of_submodules(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(f"engine.interop.lightning.{module}"), name)


def test_what_is_elsewhere() -> None:
    with pytest.raises(AttributeError, match=r"engine\.Engine"):
        _ = OURS.Fabric
