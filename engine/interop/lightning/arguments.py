"""``Trainer``'s arguments, with Lightning's names, values and defaults, as settings and callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.config.duration import NEVER, Every
from engine.config.other_trainers import hint
from engine.interop.lightning import callbacks as named
from engine.interop.lightning import ckpt
from engine.interop.lightning.loggers import CSVLogger, TensorBoardLogger
from engine.interop.lightning.strategies import strategy
from engine.loop.run import Run

_SAME = (
    *("accelerator", "num_nodes", "precision", "fast_dev_run", "min_epochs", "min_steps", "limit_train_batches"),
    *("limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches", "num_sanity_val_steps"),
    *("log_every_n_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "deterministic"),
    *("benchmark", "detect_anomaly", "sync_batchnorm"),
)
"""Arguments that mean the same in ``Fit``; ``None`` is its default."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "reload_dataloaders_every_n_epochs": (0,),
    "enable_autolog_hparams": (True,),
    "model_registry": (None,),
}
"""Arguments without a counterpart: the values under which nothing is asked for."""
_PROFILERS = {"simple": named.SimpleProfiler, "pytorch": named.PyTorchProfiler}
_DEFAULTS = (
    ("enable_progress_bar", named.ProgressBar, named.RichProgressBar),
    ("enable_model_summary", named.ModelSummary, named.ModelSummary),
    ("enable_checkpointing", named.Checkpoint, named.ModelCheckpoint),
)


@dataclass
class Translated:
    """Lightning's arguments as ``Fit`` needs them."""

    settings: dict[str, Any]
    loggers: list[Any]
    callbacks: list[Any]
    """Those given and Lightning's default ones; those that save checkpoints come last."""
    profilers: list[Any]
    batches: tuple[int | float, int | None] | None = None
    """``val_check_interval`` and ``check_val_every_n_epoch`` where ``settings`` cannot say it."""


def translate(given: Mapping[str, Any]) -> Translated:
    """The ``given`` arguments of ``Trainer``, all of them.

    Raises:
        ValueError, TypeError: one that has no counterpart, or contradicts another; the message names what to use.
    """
    for name, neutral in _NEUTRAL.items():
        if given[name] not in neutral:
            raise ValueError(f"Trainer({name}={given[name]!r}) has no counterpart{hint(name, ())}")
    ckpt.reader(given["plugins"])
    settings = {name: given[name] for name in _SAME if given[name] is not None} | _limits(given)
    if given["devices"] != "auto":
        settings["devices"] = "auto" if given["devices"] in (-1, "-1") else given["devices"]
    if given["strategy"] != "auto":
        settings["strategy"] = strategy(given["strategy"])
    if given["barebones"]:
        settings |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    loggers, profiler, root = _loggers(given), given["profiler"], Path(given["default_root_dir"] or ".")
    placed = next((each.root_dir for each in loggers if getattr(each, "root_dir", None) is not None), None)
    settings["root_dir"] = placed or (root / "lightning_logs" if loggers else root)
    if isinstance(profiler, str):
        if profiler not in _PROFILERS:
            raise ValueError(
                f"Trainer(profiler={profiler!r}): possible are {', '.join(_PROFILERS)}, or one of these objects"
            )
        profiler = _PROFILERS[profiler]()
    found = Translated(settings, loggers, _callbacks(given, settings), [] if profiler is None else [profiler])
    _validation(given, found)
    return found


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    epochs, steps, time = given["max_epochs"], given["max_steps"], given["max_time"]
    if epochs is None and steps == -1 and time is None:
        epochs = 1000
    time = timedelta(**time) if isinstance(time, Mapping) else time
    asked = (("max_epochs", epochs), ("max_steps", steps), ("max_time", time))
    return {name: value for name, value in asked if value not in (None, -1)} or {"max_steps": NEVER}


def _loggers(given: Mapping[str, Any]) -> list[Any]:
    asked = given["logger"]
    if given["barebones"] or given["fast_dev_run"] or asked is False:
        return []
    if asked is None or asked is True:
        there = any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX")))
        return [TensorBoardLogger(save_dir=None) if there else CSVLogger(save_dir=None)]
    return list(asked) if isinstance(asked, (list, tuple, set)) else [asked]


def _callbacks(given: Mapping[str, Any], settings: dict[str, Any]) -> list[Any]:
    asked, bare = given["callbacks"], given["barebones"]
    mine = [] if asked is None else list(asked) if isinstance(asked, (list, tuple)) else [asked]
    for name, kind, default in _DEFAULTS:
        there, on = any(isinstance(each, kind) for each in mine), given[name]
        # A given summary stays although Lightning's default one is switched off.
        if (there and on is False and kind is not named.ModelSummary) or (bare and (there or on)):
            raise ValueError(
                f"Trainer({name}={on}, barebones={bare}) contradicts the {kind.__name__} in callbacks, or the other: leave one out"
            )
        if not there and on is not False and not bare:
            mine.append(default())
    for each in (each for each in mine if isinstance(each, named.GradientAccumulationScheduler)):
        if given["accumulate_grad_batches"] != 1:
            raise ValueError("accumulate_grad_batches and a GradientAccumulationScheduler were given: leave one out")
        settings["accumulate_grad_batches"] = each.scheduling
    return sorted(mine, key=lambda each: isinstance(each, named.Checkpoint))


def _validation(given: Mapping[str, Any], found: Translated) -> None:
    asked, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    interval: Any = timedelta(**asked) if isinstance(asked, Mapping) else asked
    in_time = isinstance(interval, (str, timedelta))
    if (
        (in_time and epochs not in (None, 1))
        or (epochs is None and not in_time and not isinstance(interval, int))
        or interval == 0
    ):
        raise ValueError(
            f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs}): give a time without epochs, with None a number of "
            "batches (an int); limit_val_batches=0 switches validation off"
        )
    if in_time:
        found.settings["val_every"] = interval
    elif interval is None or (interval == 1 and isinstance(interval, float)):
        found.settings["val_every"] = f"{min(epochs, NEVER)} epochs"  # sys.maxsize: never
    else:
        found.batches = interval, epochs


class InBatches(Every):
    """``val_check_interval`` and ``check_val_every_n_epoch`` as Lightning counts them: micro-batches of an epoch, or of all (``epochs``: ``None``).

    Raises:
        ValueError: more than an epoch has, or not a multiple of an optimizer step's.
    """

    def __init__(self, run: Run, interval: int | float, epochs: int | None) -> None:
        super().__init__(None)
        self.run, self.interval, self.epochs = run, interval, epochs

    @property
    def batches(self) -> int | None:
        """Between two validations; ``None``: the epoch's, whose number is not known."""
        length = self.run.num_train_batches
        if isinstance(self.interval, int):
            return self.interval
        return None if length is None else max(1, int(length * self.interval))

    @property
    def done(self) -> int:
        """Micro-batches so far."""
        return self.run.state.batches if self.epochs is None else self.run.state.batch_idx

    def start(self, step: int, epochs: Any = None) -> None:
        length, window, batches = self.run.num_train_batches, self.run.window_at(self.run.epoch), self.batches
        too_many = batches is not None and self.epochs is not None and length is not None and batches > length
        if too_many or (batches is not None and batches != length and batches % window):
            raise ValueError(
                f"val_check_interval={self.interval}: validation every {batches} batches, in epochs of {length}, with {window} in an optimizer "
                f"step: give a multiple of {window} that an epoch has, or check_val_every_n_epoch=None to count over epochs"
            )

    def due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Any = None) -> bool:
        if self.epochs is not None and (self.run.state.epoch + 1) % self.epochs:
            return False
        if epoch_end is not None and self.run.num_train_batches is None:
            return True
        return self.batches is not None and self.done > 0 and self.done % self.batches == 0

    def next_step(self, step: int) -> int:
        if self.batches is None:
            return NEVER
        if not self.run.module.automatic_optimization:
            return step  # the module's steps are not counted in batches
        return step + max(1, (self.batches - self.done % self.batches) // self.run.window_at(self.run.state.epoch))
