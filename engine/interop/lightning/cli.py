"""``LightningCLI``: the command line of a Lightning project, parsed by jsonargparse. ``fit run`` is this library's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from engine.interop.lightning.callback import Callback
from engine.interop.lightning.module import LightningDataModule, LightningModule
from engine.interop.lightning.refused import ANY, translated
from engine.interop.lightning.trainer import Trainer
from engine.utils.seed import seed_everything

ArgsType = Any
_COMMANDS = ("fit", "validate", "test", "predict")
_WITHOUT = {
    "auto_configure_optimizers": (ANY, ""),  # it asks for nothing: optimizers are the module's, or add_argument's
    "parser_class": (None, "override add_arguments_to_parser"),
    "save_config_callback": (ANY, ""),
    "save_config_kwargs": (None, "the settings of a run are in its folder and its checkpoints"),
}


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
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        *,
        trainer_class: Any = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        **options: Any,
    ) -> None:
        for name in translated("LightningCLI", "", (), options, _WITHOUT):
            raise TypeError(f"LightningCLI() got an unexpected argument {name!r}")
        self._trainer = trainer_class, dict(trainer_defaults or {})
        self._classes = (
            ("model", model_class or LightningModule, subclass_mode_model or model_class is None),
            ("data", datamodule_class or LightningDataModule, subclass_mode_data or datamodule_class is None),
        )
        self._seed = int(seed_everything_default) if seed_everything_default is not True else True
        self.parser = LightningArgumentParser(**parser_kwargs or {})
        self.subcommand = None
        if run:
            commands = self.parser.add_subcommands()
            for name in _COMMANDS:
                own = self._filled(LightningArgumentParser(**parser_kwargs or {}))
                own.add_method_arguments(
                    Trainer, name, skip={"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
                )
                commands.add_subcommand(name, own)
        else:
            self._filled(self.parser)
        given = (
            self.parser.parse_object(args) if isinstance(args, (Mapping, Namespace)) else self.parser.parse_args(args)
        )
        self.config = given
        if run:
            self.subcommand = given.subcommand
        found = given[self.subcommand] if run else given
        seed = found.get("seed_everything")
        if seed is not None and seed is not False:
            seed_everything(0 if seed is True else int(seed))
        self.config_init = self.parser.instantiate_classes(given)
        self.instantiate_classes(self.config_init[self.subcommand] if run else self.config_init)
        if run:
            self._run(found)

    def _filled(self, parser: LightningArgumentParser) -> LightningArgumentParser:
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a YAML file")
        parser.add_argument("--seed_everything", type=bool | int, default=self._seed, help="of python, numpy and torch")
        parser.add_class_arguments(self._trainer[0], "trainer", fail_untyped=False, instantiate=False)
        parser.set_defaults(
            {f"trainer.{name}": value for name, value in self._trainer[1].items() if name != "callbacks"}
        )
        for key, kind, any_subclass in self._classes:
            needed = key == "model"
            if needed or kind is not LightningDataModule or any_subclass:
                parser.add_lightning_class_args(kind, key, any_subclass, required=needed)
        self.add_arguments_to_parser(parser)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override it to add arguments, or links between them."""

    def instantiate_classes(self, config: Any) -> None:
        """Make ``model``, ``datamodule`` and ``trainer``."""
        self.model, self.datamodule = config["model"], config.get("data")
        options = dict(config["trainer"].as_dict() if isinstance(config["trainer"], Namespace) else config["trainer"])
        more = self._trainer[1].get("callbacks")
        if more is not None:
            given = options.get("callbacks") or []
            options["callbacks"] = [
                *(more if isinstance(more, (list, tuple)) else [more]),
                *(given if isinstance(given, list) else [given]),
            ]
        self.trainer = self._trainer[0](**options)

    def _run(self, config: Any) -> None:
        command = str(self.subcommand)
        names = ("ckpt_path", "weights_only", "verbose", "return_predictions")
        options = {name: config[name] for name in names if name in config}
        getattr(self, f"before_{command}", lambda: None)()
        getattr(self.trainer, command)(self.model, datamodule=self.datamodule, **options)
        getattr(self, f"after_{command}", lambda: None)()
