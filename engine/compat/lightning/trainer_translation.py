"""``Trainer``'s arguments, with Lightning's names, values and defaults, as settings and callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import engine.callbacks as own
from engine.compat.lightning import callbacks as named
from engine.compat.lightning import trainer_settings as config
from engine.compat.lightning.callback import lightnings
from engine.compat.lightning.loggers import CSVLogger, TensorBoardLogger
from engine.compat.lightning.strategies import SingleDeviceStrategy
from engine.config.kinds import wrong_type

_PROFILERS = {"simple": named.SimpleProfiler, "pytorch": named.PyTorchProfiler}
_DEFAULTS = {
    "ProgressBar": named.RichProgressBar,
    "ModelSummary": named.ModelSummary,
    "Checkpoint": named.ModelCheckpoint,
}
_MARKS = {"ProgressBar": "shows_progress", "Checkpoint": "is_checkpoint"}
"""Attributes of callbacks that are of these kinds."""


@dataclass
class Translated:
    """Lightning's arguments as ``Fit`` needs them."""

    settings: dict[str, Any]
    loggers: list[Any]
    callbacks: list[Any]
    """Those given and Lightning's default ones; those that save checkpoints come last."""
    others: list[Any]
    """A profiler, and what counts validations in batches."""


def translate(given: Mapping[str, Any]) -> Translated:
    """The ``given`` arguments of ``Trainer``; an error names one that has no counterpart or contradicts another, and what to use."""
    if isinstance(given["strategy"], SingleDeviceStrategy):
        given = {**given, **given["strategy"].trainer_arguments(given)}
    settings, batches = config.settings(given)
    loggers, profiler = _loggers(given), given["profiler"]
    placed = next((each.root_dir for each in loggers if getattr(each, "root_dir", None) is not None), None)
    if loggers:
        settings["root_dir"] = placed or settings["root_dir"] / "lightning_logs"
    callbacks = _callbacks(given, settings)
    if isinstance(profiler, str):
        profiler = _PROFILERS[profiler]()
    others = [] if profiler is None else [profiler]
    others += [] if batches is None else [own.BatchValidation(*batches)]
    return Translated(settings, loggers, callbacks, others)


def _loggers(given: Mapping[str, Any]) -> list[Any]:
    asked = given["logger"]
    if given["barebones"] or given["fast_dev_run"] or asked is False:
        return []
    if asked is None or asked is True:
        there = any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX")))
        return [TensorBoardLogger(save_dir=None) if there else CSVLogger(save_dir=None)]
    loggers = list(asked) if isinstance(asked, (list, tuple, set)) else [asked]
    for entry in loggers:
        if not hasattr(entry, "log_metrics"):
            raise wrong_type(
                "Trainer: logger", entry, "True, False, a Logger, an object with log_metrics, or a list of these"
            )
    return loggers


def _callbacks(given: Mapping[str, Any], settings: dict[str, Any]) -> list[Any]:
    asked, bare = given["callbacks"], given["barebones"]
    mine = [] if asked is None else list(asked) if isinstance(asked, (list, tuple)) else [asked]
    kinds = {kind for kind in _DEFAULTS if any(_is_of(callback, kind) for callback in mine)}
    config.check_callbacks(given, kinds)
    for name, kind in config.DEFAULT_CALLBACKS.items():
        if kind not in kinds and given[name] is not False and not bare:
            mine.append(_DEFAULTS[kind]())
    for each in (each for each in mine if isinstance(each, named.GradientAccumulationScheduler)):
        if given["accumulate_grad_batches"] != 1:
            raise ValueError("accumulate_grad_batches and a GradientAccumulationScheduler were given: leave one out")
        settings["accumulate_grad_batches"] = each.scheduling
    return sorted(mine, key=lambda callback: _is_of(callback, "Checkpoint"))


def _is_of(callback: Any, kind: str) -> bool:
    """A callback of this library, under its own or Lightning's name, or of the installed Lightning is of a kind of :data:`_DEFAULTS`."""
    ours = isinstance(callback, own.ModelSummary) if kind == "ModelSummary" else getattr(callback, _MARKS[kind], False)
    return bool(ours or isinstance(callback, getattr(named, kind)) or lightnings(type(callback), kind))
