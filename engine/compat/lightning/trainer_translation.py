"""Translates ``Trainer``'s arguments (Lightning's names, values and defaults) to settings and callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine.callbacks as own
from engine.compat.lightning import callbacks as named
from engine.compat.lightning import trainer_settings as config
from engine.compat.lightning.callback import lightning_base
from engine.compat.lightning.file_loggers import FileLogger
from engine.compat.lightning.log_folders import version_folder
from engine.compat.lightning.loggers import CSVLogger, DummyLogger, TensorBoardLogger, WrappedLogger
from engine.compat.lightning.strategies import SingleDeviceStrategy
from engine.config.kinds import wrong_type
from engine.utils.paths import expanded

_PROFILERS = {"simple": named.SimpleProfiler, "pytorch": named.PyTorchProfiler}
_DEFAULTS = {
    "ProgressBar": named.RichProgressBar,
    "ModelSummary": named.ModelSummary,
    "Checkpoint": named.ModelCheckpoint,
}
_MARKS = {"ProgressBar": "shows_progress", "Checkpoint": "is_checkpoint", "EarlyStopping": "is_early_stopping"}
"""Kind of callback -> the attribute that is true for callbacks of this kind."""


@dataclass
class Translated:
    """Lightning's arguments, translated for ``Fit``."""

    settings: dict[str, Any]
    loggers: list[Any]
    callbacks: list[Any]
    """The user's callbacks and Lightning's default ones; the ones that save checkpoints come last."""
    other_callbacks: list[Any]
    """The profiler, and the callback that validates at intervals of micro-batches, if there are any."""


def translate(arguments: Mapping[str, Any]) -> Translated:
    """Translate ``Trainer``'s arguments.

    Raises:
        ValueError, TypeError: an argument has no counterpart, or contradicts another; the message says what to use.
    """
    if isinstance(arguments["strategy"], SingleDeviceStrategy):
        arguments = {**arguments, **arguments["strategy"].trainer_arguments(arguments)}
    settings, batches = config.settings(arguments)
    loggers, profiler = _loggers(arguments), arguments["profiler"]
    callbacks = _callbacks(arguments, settings)
    if isinstance(profiler, str):
        profiler = _PROFILERS[profiler]()
    other_callbacks = [] if profiler is None else [profiler]
    other_callbacks += [] if batches is None else [own.BatchValidation(*batches)]
    return Translated(settings, loggers, callbacks, other_callbacks)


def run_root(loggers: list[Any], root_dir: str) -> Path:
    """The ``root_dir`` of a run: the folder of the first logger. ``root_dir``: the trainer's ``default_root_dir``."""
    first = next(iter(loggers), None)
    if first is None or isinstance(first, DummyLogger):
        return Path(root_dir)
    if isinstance(first, FileLogger):
        return Path(first.run_root)
    if isinstance(first, WrappedLogger):
        return Path(first.root_dir or os.path.join(root_dir, "lightning_logs"))
    name, version = getattr(first, "name", None), getattr(first, "version", None)
    if name is None or version is None:
        return Path(root_dir, "lightning_logs")
    save_dir = getattr(first, "save_dir", None) or root_dir
    return Path(expanded(version_folder(os.path.join(save_dir, str(name)), version)))


def _loggers(arguments: Mapping[str, Any]) -> list[Any]:
    """The loggers that the arguments ask for, or Lightning's default one."""
    value = arguments["logger"]
    if arguments["barebones"] or value is False or (isinstance(value, (list, tuple)) and not value):
        return []
    if arguments["fast_dev_run"]:
        return [DummyLogger()]
    if value is None or value is True:
        has_tensorboard = any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX")))
        return [(TensorBoardLogger if has_tensorboard else CSVLogger)(arguments["default_root_dir"] or os.getcwd())]
    return checked_loggers(list(value) if isinstance(value, (list, tuple, set)) else [value])


def checked_loggers(loggers: Iterable[Any]) -> list[Any]:
    """``loggers`` as a list.

    Raises:
        TypeError: one of them is not a logger.
    """
    loggers = list(loggers)
    for entry in loggers:
        if not hasattr(entry, "log_metrics"):
            raise wrong_type(
                "Trainer: logger", entry, "True, False, a Logger, an object with log_metrics, or a list of these"
            )
    return loggers


def _callbacks(arguments: Mapping[str, Any], settings: dict[str, Any]) -> list[Any]:
    """The user's and Lightning's default callbacks; a schedule of accumulation windows among them goes into ``settings``."""
    value, bare = arguments["callbacks"], arguments["barebones"]
    callbacks = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    kinds = {kind for kind in _DEFAULTS if any(is_of(callback, kind) for callback in callbacks)}
    config.check_callbacks(arguments, kinds)
    for name, kind in config.DEFAULT_CALLBACKS.items():
        if kind not in kinds and arguments[name] is not False and not bare:
            callbacks.append(_DEFAULTS[kind]())
    for scheduler in (
        scheduler for scheduler in callbacks if isinstance(scheduler, named.GradientAccumulationScheduler)
    ):
        if arguments["accumulate_grad_batches"] != 1:
            raise ValueError("accumulate_grad_batches and a GradientAccumulationScheduler were given: leave one out")
        settings["accumulate_grad_batches"] = scheduler.scheduling
    return sorted(callbacks, key=lambda callback: is_of(callback, "Checkpoint"))


def is_of(callback: Any, kind: str) -> bool:
    """Whether a callback (ours, under our name or Lightning's, or one of the installed Lightning) is of a kind of :data:`_DEFAULTS`, or an
    ``"EarlyStopping"``."""
    is_marked = (
        isinstance(callback, own.ModelSummary) if kind == "ModelSummary" else getattr(callback, _MARKS[kind], False)
    )
    return bool(is_marked or isinstance(callback, getattr(named, kind)) or lightning_base(type(callback), kind))
