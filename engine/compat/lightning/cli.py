"""``LightningCLI``: the command line of a Lightning project, parsed by jsonargparse. ``fit run`` is this library's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from engine.callback import Callback
from engine.compat.lightning.module import LightningDataModule, LightningModule
from engine.compat.lightning.trainer import Trainer
from engine.compat.lightning.utilities import seed_everything

ArgsType = Any
OptimizerCallable = LRSchedulerCallable = Callable[..., Any]
_COMMANDS = ("fit", "validate", "test", "predict")
_OPTIONS = ("ckpt_path", "weights_only", "verbose", "return_predictions")
_DATA = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}


class LightningArgumentParser(ArgumentParser):
    """A parser of arguments of classes."""

    def add_lightning_class_args(self, kind: Any, key: str, subclass_mode: bool = False, required: bool = True) -> None:
        """The parameters of ``kind`` as ``--key.name``; with ``subclass_mode`` its subclasses by ``class_path``."""
        if subclass_mode:
            self.add_subclass_arguments(kind, key, fail_untyped=False, required=required)
        else:
            self.add_class_arguments(kind, key, fail_untyped=False, sub_configs=True)


class SaveConfigCallback(Callback):
    """The settings of a run are in its folder and in its checkpoints already."""


class LightningCLI:
    """``fit``, ``validate``, ``test`` and ``predict`` with ``--model.*``, ``--data.*``, ``--trainer.*``, ``--seed_everything`` and ``--config``.

    Without ``model_class`` (or with ``subclass_mode_model``) the module is ``--model my.module.Net``. ``run=False`` makes the objects only.
    """

    def __init__(
        self, model_class: Any = None, datamodule_class: Any = None, save_config_callback: Any = SaveConfigCallback,
        save_config_kwargs: Any = None, trainer_class: Any = Trainer, trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True, parser_kwargs: Mapping[str, Any] | None = None,
        subclass_mode_model: bool = False, subclass_mode_data: bool = False, args: ArgsType = None, run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:  # fmt: skip
        if save_config_kwargs is not None:
            raise ValueError("LightningCLI(save_config_kwargs=...): settings are in a run's folder and its checkpoints")
        self._trainer, self._seed = (trainer_class, dict(trainer_defaults or {})), seed_everything_default
        self._classes = (
            ("model", model_class or LightningModule, subclass_mode_model or model_class is None),
            ("data", datamodule_class or LightningDataModule, subclass_mode_data or datamodule_class is None),
        )
        self.parser = LightningArgumentParser(**parser_kwargs or {})
        if run:
            commands = self.parser.add_subcommands()
            for name in _COMMANDS:
                own = self._filled(LightningArgumentParser(**parser_kwargs or {}))
                own.add_method_arguments(trainer_class, name, skip=set(_DATA))
                commands.add_subcommand(name, own)
        else:
            self._filled(self.parser)
        as_object = isinstance(args, (Mapping, Namespace))
        self.config = self.parser.parse_object(args) if as_object else self.parser.parse_args(args)
        self.subcommand: str | None = self.config.subcommand if run else None
        found = self.config if self.subcommand is None else self.config[self.subcommand]
        if found["seed_everything"] is not False:
            seed_everything(None if found["seed_everything"] is True else found["seed_everything"])
        self.config_init = self.parser.instantiate(self.config)
        self.instantiate_classes(self.config_init if self.subcommand is None else self.config_init[self.subcommand])
        if run:
            options = {key: found[key] for key in _OPTIONS if key in found}
            getattr(self, f"before_{self.subcommand}", lambda: None)()
            getattr(self.trainer, str(self.subcommand))(self.model, datamodule=self.datamodule, **options)
            getattr(self, f"after_{self.subcommand}", lambda: None)()

    def _filled(self, parser: LightningArgumentParser) -> LightningArgumentParser:
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a YAML file")
        parser.add_argument("--seed_everything", type=bool | int, default=self._seed, help="of python, numpy and torch")
        parser.add_class_arguments(self._trainer[0], "trainer", fail_untyped=False, instantiate=False)
        defaults = {f"trainer.{name}": value for name, value in self._trainer[1].items() if name != "callbacks"}
        parser.set_defaults(defaults)
        for key, kind, any_subclass in self._classes:
            parser.add_lightning_class_args(kind, key, any_subclass, required=key == "model")
        self.add_arguments_to_parser(parser)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override it to add arguments, or links between them."""

    def instantiate_classes(self, config: Any) -> None:
        """Make ``trainer``, with those callbacks of ``trainer_defaults`` first; ``model`` and ``datamodule`` are made already."""
        self.model, self.datamodule, options = config["model"], config.get("data"), dict(config["trainer"].as_dict())
        both = (self._trainer[1].get("callbacks"), options.get("callbacks"))
        lists = [each if isinstance(each, list) else [each] for each in both if each is not None]
        self.trainer = self._trainer[0](**{**options, "callbacks": [each for part in lists for each in part]})
