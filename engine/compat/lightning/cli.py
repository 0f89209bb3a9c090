"""``LightningCLI``: the command line of a Lightning project, parsed by jsonargparse. (This library's own command line is ``fit run``.)"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, class_from_function, get_loader, set_loader
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from engine.compat.lightning.callback import Callback
from engine.compat.lightning.module import LightningDataModule, LightningModule
from engine.compat.lightning.names import MODULES
from engine.compat.lightning.plugins import CheckpointIO
from engine.compat.lightning.trainer import Trainer
from engine.compat.lightning.utilities import seed_everything
from engine.config.described_objects import ObjectKind, check_described
from engine.module import overrides
from engine.strategies.base import Strategy
from engine.utils.hard_links import separate
from engine.utils.log import logger

ArgsType = Any
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
_DATA = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
_AUTOMATIC = "AUTOMATIC"
_OF_TRAINER = {
    "strategy": ObjectKind((Strategy,), "a strategy"),
    "plugins": ObjectKind((CheckpointIO,), "a CheckpointIO"),
}
"""The objects for arguments of ``Trainer`` that have no type, because strategies and plugins are also given by name."""
_PATH = re.compile(r"(--[^=]+=)?(?:lightning\.pytorch|pytorch_lightning)\.([\w.]+)\.(\w+)")
"""The import path of one of Lightning's classes, as a value in a configuration or as a command-line argument."""
_MODE = "lightning"
"""The name under which our configuration loader is registered with jsonargparse (its ``parser_mode``)."""


class ReduceLROnPlateau(schedulers.ReduceLROnPlateau):
    """torch's ``ReduceLROnPlateau`` with the name of the metric to follow, ``monitor``."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (schedulers.LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = schedulers.LRScheduler | ReduceLROnPlateau
LRSchedulerCallable = Callable[[Optimizer], LRSchedulerTypeUnion]


def with_our_paths(value: Any) -> Any:
    """Copy a configuration or a list of arguments, with the import paths of Lightning's classes replaced by those of ours.

    Raises:
        ValueError: a class has no counterpart; the message says what to use instead.
    """
    if isinstance(value, Mapping):
        return {name: with_our_paths(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [*map(with_our_paths, value)]
    match = _PATH.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    option, module, name = match.groups(default="")
    part = next((part for part, paths in MODULES.items() if module in paths.split()), "")
    file = "module" if part == "core" else part
    kind = getattr(importlib.import_module(f"engine.compat.lightning.{file}"), name, None) if part else None
    if instead := getattr(kind, "refused", ""):
        raise ValueError(f"{value} has no counterpart: {instead}")
    return f"{option}{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else value


set_loader(_MODE, lambda text: with_our_paths(get_loader("yaml")(text)), (yaml.YAMLError,))


class LightningArgumentParser(ArgumentParser):
    """A parser of the arguments of classes. A ``class_path`` that names one of Lightning's classes selects our class of that name."""

    def __init__(self, *args: Any, env_prefix: str = "PL", parser_mode: str = _MODE, **kwargs: Any) -> None:
        super().__init__(*args, env_prefix=env_prefix, parser_mode=parser_mode, **kwargs)
        self.callback_keys: list[str] = []
        """The keys of callbacks that are added to every run; the command line gives their arguments."""
        self.optimizers: dict[str, tuple[Any, str]] = {}
        """Key of an optimizer's arguments -> its class (or a tuple of classes) and the argument that receives them."""
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}
        """Key of a learning rate scheduler's arguments -> its class (or a tuple of classes) and the argument that receives them."""

    def parse_args(self, args: Sequence[str] | None = None, *further_arguments: Any, **options: Any) -> Namespace:  # type: ignore[override]
        return super().parse_args(
            with_our_paths(sys.argv[1:] if args is None else [*args]), *further_arguments, **options
        )

    def parse_object(self, obj: Namespace | dict[str, Any], *further_arguments: Any, **options: Any) -> Namespace:
        return super().parse_object(with_our_paths(obj), *further_arguments, **options)

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> Any:
        """Add options ``--nested_key.name`` for the parameters of a trainer, module, data module or callback, or of a function that returns one.

        Args:
            subclass_mode: accept any subclass, given by its ``class_path``.

        Raises:
            TypeError: ``lightning_class`` is none of these.
        """
        kind = lightning_class if isinstance(lightning_class, type) else class_from_function(lightning_class)
        if not issubclass(kind, (Trainer, LightningModule, LightningDataModule, Callback)):
            raise TypeError(
                f"add_lightning_class_args got {kind.__name__}: give a Trainer, LightningModule, LightningDataModule or Callback, or a "
                "function that is annotated to return one"
            )
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
        makes = not issubclass(kind, Trainer)
        return self.add_class_arguments(kind, nested_key, fail_untyped=False, instantiate=makes, sub_configs=True)

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = _AUTOMATIC
    ) -> None:
        """Add options ``--nested_key.name`` for the parameters of an optimizer; a tuple of classes allows any subclass by its ``class_path``.

        ``link_to``: the argument that receives the parsed values; by default they configure the run's optimizer.
        """
        self.optimizers[nested_key] = (optimizer_class, link_to)
        self._add(optimizer_class, nested_key, "params")

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Any = LRSchedulerTypeTuple, nested_key: str = "lr_scheduler", link_to: str = _AUTOMATIC
    ) -> None:  # fmt: skip
        """Add options for the parameters of a learning rate scheduler; see :meth:`add_optimizer_args`."""
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)
        self._add(lr_scheduler_class, nested_key, "optimizer")

    def _add(self, kind: Any, key: str, skipped: str) -> None:
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {skipped}}
        if isinstance(kind, tuple):
            self.add_subclass_arguments(kind, key, **options)
        else:
            self.add_class_arguments(kind, key, sub_configs=True, **options)

    def link(self) -> None:
        """Pass the parsed values of optimizers and schedulers on to the arguments that were named with ``link_to``."""
        for key, (kind, destination) in (self.optimizers | self.lr_schedulers).items():
            if destination != _AUTOMATIC:
                path = None if isinstance(kind, tuple) else partial(_with_class_path, kind)
                self.link_arguments(key, destination, compute_fn=path)


class SaveConfigCallback(Callback):
    """Writes the parsed ``config`` into the run's folder; the ``parser`` can repeat the run from it.

    Args:
        config_filename: the name of the file. An existing one is replaced: a logger, or this run before it was resumed, has written it.
        overwrite: has no effect, because each run has its own folder.
        multifile: write as many files as the configuration was read from.
        save_to_log_dir: with ``False`` only :meth:`save_config` is called.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Namespace, config_filename: str = "config.yaml",
        overwrite: bool = False, multifile: bool = False, save_to_log_dir: bool = True,
    ) -> None:  # fmt: skip
        self.parser, self.config = parser, config
        self.config_filename, self.overwrite, self.multifile = config_filename, overwrite, multifile
        self.save_to_log_dir, self.already_saved = save_to_log_dir, False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            self._save(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # As late as this, because CSVLogger writes the run's settings to the same folder first.
        self._save(trainer, pl_module, "fit")

    def _save(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.already_saved:
            return
        folder = Path(trainer.log_dir)
        if trainer.is_global_zero:
            if self.save_to_log_dir:
                folder.mkdir(parents=True, exist_ok=True)
                path = str(folder / self.config_filename)
                separate(path)
                self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=self.multifile)
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Override this method to save the settings elsewhere too; it is called on rank 0."""


class LightningCLI:
    """``fit``, ``validate``, ``test`` and ``predict`` with ``--model.*``, ``--data.*``, ``--trainer.*``, ``--optimizer``, ``--lr_scheduler``,
    ``--seed_everything`` and ``--config``.

    Without ``model_class`` (or with ``subclass_mode_model``), ``--model my.module.Net`` selects the module. ``run=False`` only creates the objects.
    """

    def __init__(
        self, model_class: Any = None, datamodule_class: Any = None, save_config_callback: Any = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None, trainer_class: Any = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None, seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None, parser_class: Any = LightningArgumentParser,
        subclass_mode_model: bool = False, subclass_mode_data: bool = False, args: ArgsType = None, run: bool = True,
        auto_configure_optimizers: bool = True, load_from_checkpoint_support: bool = True,
    ) -> None:  # fmt: skip
        self.save_config_callback, self.save_config_kwargs = save_config_callback, dict(save_config_kwargs or {})
        self.trainer_class, self.trainer_defaults = trainer_class, dict(trainer_defaults or {})
        self.seed_everything_default, self.auto_configure_optimizers = (
            seed_everything_default,
            auto_configure_optimizers,
        )
        self.parser_class, self.parser_kwargs = parser_class, dict(parser_kwargs or {})
        self._classes = (
            ("model", model_class or LightningModule, subclass_mode_model or model_class is None),
            ("data", datamodule_class or LightningDataModule, subclass_mode_data or datamodule_class is None),
        )
        commands, self._parsers = self.subcommands(), {}
        common = {name: value for name, value in self.parser_kwargs.items() if name not in commands}
        self.parser = self.init_parser(**common)
        if run:
            added = self.parser.add_subcommands()
            for name, skipped in commands.items():
                parser = self._with_options(self.init_parser(**common, **self.parser_kwargs.get(name, {})))
                parser.add_method_arguments(trainer_class, name, skip=skipped)
                added.add_subcommand(name, parser)
                self._parsers[name] = parser
        else:
            self._with_options(self.parser)
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config.subcommand if run else None
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            self._subcommand_config(self.config)["seed_everything"] = seed_everything(None if seed is True else seed)
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # -- the parser -------------------------------------------------------------------------------------------------------------

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The trainer's methods that are subcommands -> those of their arguments that are not options of the command line."""
        return {name: set(_DATA) for name in ("fit", "validate", "test", "predict")}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Create a parser with the option ``--config``."""
        parser: LightningArgumentParser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="a YAML file")
        return parser

    def _with_options(self, parser: LightningArgumentParser) -> LightningArgumentParser:
        """Add all options of a subcommand to ``parser``, and return it."""
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
        parser.link()
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--seed_everything``."""
        default = self.seed_everything_default
        parser.add_argument("--seed_everything", type=bool | int, default=default, help="of python, numpy and torch")

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the trainer, the module and the data module."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        for key, kind, any_subclass in self._classes:
            parser.add_lightning_class_args(kind, key, any_subclass, required=key == "model")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override this method to add arguments, or links between them."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, or the command line, into :attr:`config`."""
        as_object = isinstance(args, (Mapping, Namespace))
        self.config = parser.parse_object(args) if as_object else parser.parse_args(args)

    def _subcommand_config(self, config: Namespace) -> Namespace:
        config_of_command: Namespace = config if self.subcommand is None else config[self.subcommand]
        return config_of_command

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        return self._subcommand_config(config).get(key, default)

    # -- the objects ------------------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Override this method to do something before the objects are created."""

    def instantiate_classes(self) -> None:
        """Create ``model``, ``datamodule`` and ``trainer`` from the configuration."""
        check_described(self._subcommand_config(self.config), "")
        check_described(self._get(self.config, "trainer"), "trainer", _OF_TRAINER)
        self.config_init = self.parser.instantiate(self.config)
        self.datamodule, self.model = self._get(self.config_init, "data"), self._get(self.config_init, "model")
        self._configure_optimizers()
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override this method to do something once the objects are created."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Create the trainer; ``kwargs`` replace its arguments. Its callbacks come from ``trainer_defaults``, its arguments and the parser."""
        parser = self.parser if self.subcommand is None else self._parsers[self.subcommand]
        options = {**self._get(self.config_init, "trainer", {}), **kwargs}
        callbacks = [
            _instantiated(callback)
            for part in (self.trainer_defaults, options)
            for callback in _as_list(part.get("callbacks"))
        ]
        callbacks += [self._get(self.config_init, key) for key in parser.callback_keys]
        if self.save_config_callback and not options.get("fast_dev_run"):
            config = self._subcommand_config(self.config)
            callbacks.append(self.save_config_callback(parser, config, **self.save_config_kwargs))
        return self.trainer_class(**options | {"callbacks": callbacks})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Override this method to return something else from the optimizer and scheduler of the command line; it replaces the module's hook."""
        if lr_scheduler is None:
            return optimizer
        if not isinstance(lr_scheduler, ReduceLROnPlateau):
            return [optimizer], [lr_scheduler]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}}

    def _configure_optimizers(self) -> None:
        """Replace the module's ``configure_optimizers`` by one that returns the optimizer and scheduler of the command line."""
        parser = self.parser if self.subcommand is None else self._parsers[self.subcommand]
        if not self.auto_configure_optimizers:
            return
        classes_and_arguments = []
        for name, register in (("optimizer", parser.optimizers), ("lr_scheduler", parser.lr_schedulers)):
            keys = [key for key, (_, destination) in register.items() if destination == _AUTOMATIC]
            if len(keys) > 1:
                raise ValueError(
                    f"LightningCLI: {', '.join(keys)} are {name}s of one run: give link_to=..., and make them in configure_optimizers"
                )
            classes_and_arguments.append(self._class_and_arguments(register[keys[0]][0], keys[0]) if keys else None)
        optimizer_config, scheduler_config = classes_and_arguments
        if optimizer_config is None:
            return
        if overrides(self.model, "configure_optimizers"):
            module_name = type(self.model).__name__
            logger.warning(
                "%s.configure_optimizers is replaced by --optimizer (LightningCLI.configure_optimizers)", module_name
            )
        optimizer = optimizer_config[0](self.model.parameters(), **optimizer_config[1])
        scheduler = None if scheduler_config is None else scheduler_config[0](optimizer, **scheduler_config[1])
        configure = partial(self.configure_optimizers, self.model, optimizer, scheduler)
        self.model.configure_optimizers = configure

    def _class_and_arguments(self, kind: Any, key: str) -> tuple[Any, dict[str, Any]] | None:
        """The class and the parsed arguments at ``key``; ``kind``: the class itself, or a tuple if the configuration names a subclass."""
        value = self._get(self.config_init, key)
        if value is None or not isinstance(kind, tuple):
            return None if value is None else (kind, value.as_dict())
        return pkgutil.resolve_name(value["class_path"]), (value.get("init_args") or Namespace()).as_dict()

    def _run(self, command: str) -> None:
        """Call the trainer's method ``command`` (or the method that overrides it here), between the hooks ``before_`` and ``after_`` it."""
        names = inspect.signature(getattr(self.trainer, command)).parameters.keys() - self.subcommands()[command]
        config = self.config_init[command]
        options = {name: config[name] for name in names if name in config}
        getattr(self, f"before_{command}", lambda: None)()
        call = getattr(self, command, getattr(self.trainer, command))
        data = {} if self.datamodule is None else {"datamodule": self.datamodule}
        call(model=self.model, **data, **options)
        getattr(self, f"after_{command}", lambda: None)()


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def instantiate_class(args: Any | tuple[Any, ...], init: Mapping[str, Any]) -> Any:
    """Create an object of the class ``init["class_path"]`` with positional ``args`` (one, or a tuple of several) and ``init["init_args"]``."""
    positional = args if isinstance(args, tuple) else (args,)
    return pkgutil.resolve_name(init["class_path"])(*positional, **(init.get("init_args") or {}))


def _instantiated(value: Any) -> Any:
    """Create the object that a dict with ``class_path`` and perhaps ``init_args`` describes; return anything else as it is."""
    if not isinstance(value, Mapping) or "class_path" not in value:
        return value
    return pkgutil.resolve_name(value["class_path"])(**value.get("init_args") or {})


def _with_class_path(kind: type, arguments: Namespace) -> dict[str, Any]:
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": arguments.as_dict()}
