"""Converts the section ``trainer`` of a Lightning project's YAML file, as ``LightningCLI`` writes it, to settings of this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.compat.key_file import KeyFile
from engine.compat.lightning import strategy_arguments as strategies
from engine.compat.lightning import trainer_settings as arguments
from engine.compat.lightning.arguments import TRAINER
from engine.config import yaml_text

_NOTED = {name: argument.in_file for name, argument in TRAINER.items() if argument.in_file}
"""Arguments that take objects, or have no meaning in a file -> the note about them."""
_USUAL: dict[str, Any] = {
    name: None if argument.setting else argument.usual for name, argument in TRAINER.items() if not argument.in_file
}
"""The default of each argument that a file may omit; with ``None`` the setting keeps our default, and is not written."""


def read(path: Path) -> KeyFile:
    """Read a file with ``trainer: {max_epochs: 3, ...}``, or with these arguments at its top level; return settings, notes and refusals.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not such a YAML file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    origin = f"file {path}"
    node = yaml_text.compose(yaml_text.read_file(path), origin, lines=True)
    values = None if node is None else yaml_text.construct(node)
    inner = values.get("trainer", values) if isinstance(values, dict) else None
    if not isinstance(inner, dict) or not inner.keys() & (_USUAL.keys() | _NOTED.keys()):
        raise ValueError(f"{origin}: has neither a 'trainer' nor its arguments, such as max_epochs")
    file = KeyFile(inner, origin, {} if inner is not values else yaml_text.origins_of_keys(node, origin, lines=True))
    for name, note in _NOTED.items():
        file.note(name, note)
    trainer_arguments = {name: file.take_value(name, usual) for name, usual in _USUAL.items()}
    trainer_arguments["check_val_every_n_epoch"] = inner.get(
        "check_val_every_n_epoch", 1
    )  # null differs from a missing key: it switches off validation by epochs
    if isinstance(trainer_arguments["strategy"], dict):
        trainer_arguments["strategy"] = _strategy(file, trainer_arguments["strategy"])
    refused = {name: argument.neutral for name, argument in TRAINER.items() if argument.neutral}
    for name, neutral in {**refused, "plugins": (None, [])}.items():
        if trainer_arguments[name] not in neutral:
            file.refuse(name, "has no counterpart that a file of settings can name")
            trainer_arguments[name] = neutral[0]
    settings, batches = arguments.settings(trainer_arguments)
    if batches is not None:
        _in_batches(file, settings, *batches)
    file.settings.update({name: str(value) if isinstance(value, Path) else value for name, value in settings.items()})
    if trainer_arguments["default_root_dir"] is None:
        del file.settings["root_dir"]
    file.finish(())
    return file


def _strategy(file: KeyFile, value: dict[str, Any]) -> Any:
    """Translate a strategy that is given as ``class_path`` and ``init_args``."""
    kind, options = str(value.get("class_path", "")).rpartition(".")[2], value.get("init_args") or {}
    if kind not in strategies.CLASSES:
        file.refuse("strategy", f"has no counterpart; there are {', '.join(strategies.CLASSES)}, and names")
        return "auto"
    name, translate = strategies.CLASSES[kind]
    return {"name": name, **{key: option for key, option in translate(options).items() if option is not None}}


def _in_batches(file: KeyFile, settings: dict[str, Any], interval: int | float, epochs: int | None) -> None:
    """Translate Lightning's interval of validations, which counts micro-batches, into optimizer steps, where it is a multiple of the window."""
    window = settings.get("accumulate_grad_batches", 1)
    if epochs is None and isinstance(interval, int) and isinstance(window, int) and interval % window == 0:
        settings["val_every"] = f"{interval // window} steps"
    elif epochs == 1 and isinstance(interval, float):
        settings["val_every"] = f"{interval} epochs"
    else:
        file.refuse(
            "val_check_interval", "counts micro-batches of an epoch: give val_every in steps, or as a share of an epoch"
        )
