"""``LightningCLI``, and Lightning's paths of submodules."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from both import OURS, data
from torch import nn, optim

from engine.interop.lightning.cli import LightningCLI, instantiate_class


class Net(OURS.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=self.hparams.lr)


class Bare(OURS.LightningModule):  # type: ignore[misc]
    """Has no optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])


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


@pytest.mark.parametrize("part", ["strategy", "plugins", "callbacks", "logger", "optimizer", "lr_scheduler", "data"])
@pytest.mark.parametrize("path", ["subprocess.getoutput", "subprocess.Popen"])
def test_what_a_configuration_names_is_checked_before_it_is_called(
    part: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = {"class_path": path, "init_args": {"cmd" if "get" in path else "args": ["touch", "called"]}}
    in_trainer = part in ("strategy", "plugins", "callbacks", "logger")
    config = {"trainer": {part: command}} if in_trainer else {part: command}
    (tmp_path / "cli.yaml").write_text(json.dumps(config))
    with pytest.raises((TypeError, SystemExit)):
        LightningCLI(Net, args=["fit", "--config", "cli.yaml"])
    assert not (tmp_path / "called").exists()


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


CALLBACKS: dict[str, dict[str, Any]] = {
    "LearningRateMonitor": {"logging_interval": "step", "log_momentum": True},
    "DeviceStatsMonitor": {"cpu_stats": False},
    "WeightAveraging": {"use_buffers": False},
    "EMAWeightAveraging": {"decay": 0.5, "update_every_n_steps": 2},
    "StochasticWeightAveraging": {"swa_lrs": 0.1, "swa_epoch_start": 1},
    "ModelSummary": {"max_depth": 2},
    "RichModelSummary": {"max_depth": -1},
    "RichProgressBar": {"refresh_rate": 5, "leave": True},
    "TQDMProgressBar": {"refresh_rate": 5},
    "EarlyStopping": {"monitor": "loss", "patience": 2, "mode": "max"},
    "ModelCheckpoint": {"monitor": "loss", "save_top_k": 2},
}
LOGGERS: dict[str, dict[str, Any]] = {
    "CSVLogger": {"save_dir": "a", "name": "b"},
    "TensorBoardLogger": {"save_dir": "a", "name": "b", "version": "c"},
}


@pytest.mark.parametrize("name", [*CALLBACKS, *LOGGERS])
def test_callbacks_and_loggers_by_class_path_have_arguments(name: str, tmp_path: Path) -> None:
    where, key = ("callbacks", "callbacks") if name in CALLBACKS else ("loggers", "logger")
    entry = {"class_path": f"engine.interop.lightning.{where}.{name}", "init_args": (CALLBACKS | LOGGERS)[name]}
    config = {"trainer": {key: [entry], "default_root_dir": str(tmp_path)}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    cli = LightningCLI(Net, Data, args=[f"--config={tmp_path / 'config.yaml'}"], run=False)
    made = [*cli.trainer.callbacks, *cli.trainer.loggers]
    assert name.removeprefix("Rich") in [type(each).__name__.removeprefix("Rich") for each in made]
    theirs = inspect.signature(getattr(getattr(lightning.pytorch, where), name))
    mine = inspect.signature(getattr(getattr(OURS, where), name))
    assert list(mine.parameters) == [each for each in theirs.parameters if "summarize" not in each]


@pytest.mark.parametrize(
    "prefix", ["", "lightning.pytorch.callbacks.", "pytorch_lightning.callbacks.model_checkpoint."]
)
@pytest.mark.parametrize("in_file", [True, False])
def test_a_class_path_of_lightnings_or_a_short_name_is_that_of_our_class(
    prefix: str, in_file: bool, tmp_path: Path
) -> None:
    path, config = f"{prefix}ModelCheckpoint", tmp_path / "config.yaml"
    entry = {"class_path": path, "init_args": {"save_top_k": 2}}
    config.write_text(json.dumps({"trainer": {"callbacks": [entry], "default_root_dir": str(tmp_path)}}))
    options = [
        f"--trainer.callbacks={path}",
        "--trainer.callbacks.save_top_k=2",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    args = [f"--config={config}"] if in_file else options
    cli = LightningCLI(
        Net,
        Data,
        args=[*args, "--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=x"],
        run=False,
    )
    [saves] = [callback for callback in cli.trainer.callbacks if callback.is_checkpoint]
    assert type(saves) is OURS.callbacks.ModelCheckpoint
    assert saves.save_top_k == 2
    assert type(cli.trainer.logger) is OURS.loggers.CSVLogger


def test_a_callback_without_a_counterpart_says_what_to_use(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.ModelPruning}]}")
    for option in (f"--config={config}", "--trainer.callbacks=lightning.pytorch.callbacks.ModelPruning"):
        with pytest.raises(ValueError, match=r"ModelPruning has no counterpart: use callbacks\.Pruning"):
            LightningCLI(Net, Data, args=[option], run=False)


def test_a_callback_of_our_own_replaces_the_default_one(tmp_path: Path) -> None:
    own = ["--trainer.callbacks+=callbacks.ModelCheckpoint", "--trainer.callbacks+=callbacks.ModelSummary"]
    cli = LightningCLI(Net, Data, args=[*own, f"--trainer.default_root_dir={tmp_path}"], run=False)
    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert sorted(kinds) == ["ModelCheckpoint", "ModelSummary", "RichProgressBar", "SaveConfigCallback"]
    assert kinds[-1] == "ModelCheckpoint"


def test_an_optimizer_from_the_command_line(tmp_path: Path) -> None:
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.max_epochs=2"]
    options = ["--optimizer=Rprop", "--optimizer.lr=0.2", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    cli = LightningCLI(
        Bare,
        Data,
        args=["fit", *options, *quiet, "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"],
    )
    [optimizer] = cli.trainer.optimizers
    assert type(getattr(optimizer, "optimizer", optimizer)) is optim.Rprop
    assert [round(each["lr"], 6) for each in optimizer.param_groups] == [0.002]
    plateau = ["--lr_scheduler=engine.interop.lightning.cli.ReduceLROnPlateau", "--lr_scheduler.monitor=loss"]
    cli = LightningCLI(Bare, Data, args=[*options[:2], *plateau], run=False)
    given = cli.model.configure_optimizers()
    assert (given["lr_scheduler"]["monitor"], type(given["optimizer"])) == ("loss", optim.Rprop)


class Further(LightningCLI):
    """Adds a callback, and an optimizer that its module takes."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(OURS.callbacks.EarlyStopping, "stop")
        parser.set_defaults({"stop.monitor": "loss", "stop.patience": 5})
        parser.add_optimizer_args(optim.SGD, "sgd", "model.optimizer")


class Taking(Net):
    def __init__(self, optimizer: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer


def test_more_classes_on_the_command_line(tmp_path: Path) -> None:
    args = ["--stop.patience=7", "--sgd.lr=0.5", f"--trainer.default_root_dir={tmp_path}"]
    cli = Further(Taking, Data, args=args, run=False)
    assert [each.patience for each in cli.trainer.early_stopping_callbacks] == [7]
    assert cli.model.optimizer["class_path"] == "torch.optim.sgd.SGD"
    assert cli.model.optimizer["init_args"]["lr"] == 0.5
    with pytest.raises(TypeError, match="add_lightning_class_args got Linear"):
        cli.parser.add_lightning_class_args(nn.Linear, "linear")


def test_the_configuration_of_a_run_is_saved(tmp_path: Path) -> None:
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]
    logger = ["--trainer.logger=engine.interop.lightning.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]
    args = ["fit", "--data.samples=12", "--trainer.max_epochs=1", *logger, *quiet]
    first = LightningCLI(Net, Data, args=args)
    saved = Path(first.trainer.log_dir) / "config.yaml"
    again = LightningCLI(Net, Data, args=["fit", f"--config={saved}"], save_config_kwargs={"config_filename": "x.yaml"})
    assert (again.datamodule.samples, again.trainer.global_step) == (12, 3)
    assert (Path(again.trainer.log_dir) / "x.yaml").exists()
    assert again.trainer.log_dir != first.trainer.log_dir
    alone = LightningCLI(Net, Data, args=args, save_config_callback=None)
    assert "seed_everything" in saved.read_text()
    assert "seed_everything" not in (Path(alone.trainer.log_dir) / "config.yaml").read_text()  # the logger's


def test_objects_alone(tmp_path: Path) -> None:
    cli = LightningCLI(Net, Data, args=["--model.width=7", f"--trainer.default_root_dir={tmp_path}"], run=False)
    assert (cli.model.hparams.width, cli.datamodule.samples, cli.trainer.max_epochs) == (7, 8, None)


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
    for path in ("demos.boring_classes", "pytorch.demos.boring_classes"):
        boring = importlib.import_module(f"engine.interop.lightning.{path}")
        with pytest.raises(NotImplementedError, match=r"lightning\.pytorch\.demos of the installed Lightning"):
            boring.BoringModel()
    with pytest.raises(NotImplementedError, match=r"engine\.Engine"):
        OURS.Fabric()


def test_a_trainers_method_gets_the_model_and_the_data_by_name(tmp_path: Path) -> None:
    """The data only if there are some, so that methods and trainers with fewer arguments work as with Lightning."""
    received: list[Any] = []

    class Trainer(OURS.Trainer):  # type: ignore[misc, name-defined]
        def fit(self, model: Any) -> None:
            received.append(type(model))

    class Cli(LightningCLI):
        def validate(self, **options: Any) -> None:
            received.append((type(options["model"]), type(options["datamodule"])))

    folder = f"--trainer.default_root_dir={tmp_path}"
    LightningCLI(Net, trainer_class=Trainer, args=["fit", folder])
    Cli(Net, Data, args=["validate", folder])
    assert received == [Net, (Net, Data)]


def test_a_callback_by_class_path_in_the_trainers_defaults(tmp_path: Path) -> None:
    stopping = {"class_path": "engine.interop.lightning.callbacks.EarlyStopping", "init_args": {"monitor": "loss"}}
    defaults = {"default_root_dir": str(tmp_path), "callbacks": stopping}
    cli = LightningCLI(Net, Data, trainer_defaults=defaults, args=[], run=False)
    [callback] = [c for c in cli.trainer.callbacks if isinstance(c, OURS.callbacks.EarlyStopping)]
    assert callback.monitor == "loss"


def test_optimizers_from_the_command_line_are_two_lists() -> None:
    args = ["--optimizer=Rprop", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"]
    optimizers, schedulers = LightningCLI(Bare, Data, args=args, run=False).model.configure_optimizers()
    assert (type(optimizers[0]), schedulers[0].step_size) == (optim.Rprop, 3)


def test_an_object_of_a_class_path() -> None:
    layer = instantiate_class((3, 4), {"class_path": "torch.nn.Linear", "init_args": {"bias": False}})
    assert (layer.weight.shape, layer.bias) == ((4, 3), None)
    assert instantiate_class(0.25, {"class_path": "torch.nn.Dropout"}).p == 0.25
