"""``Trainer``'s arguments, with Lightning's names, values and defaults, as settings and callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.config.duration import NEVER, Every, parse
from engine.config.other_trainers import hint
from engine.interop.lightning import callbacks as named
from engine.interop.lightning import loggers as known_loggers
from engine.interop.lightning.strategies import strategy
from engine.loop.run import Run

SAME = (
    *(
        "num_nodes",
        "fast_dev_run",
        "min_epochs",
        "min_steps",
        "limit_train_batches",
        "limit_val_batches",
        "accelerator",
    ),
    *("limit_test_batches", "limit_predict_batches", "overfit_batches", "num_sanity_val_steps", "log_every_n_steps"),
    *(
        "accumulate_grad_batches",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "precision",
        "deterministic",
        "benchmark",
    ),
    *("detect_anomaly", "sync_batchnorm"),
)
"""Arguments that mean the same in ``Fit``."""
NEUTRAL = {
    "plugins": (None, [], ()),
    "reload_dataloaders_every_n_epochs": (0,),
    "enable_autolog_hparams": (True,),
    "model_registry": (None,),
    "use_distributed_sampler": (True,),
}
"""Arguments without a counterpart: the values under which nothing is asked for."""
PROFILERS = {"simple": named.SimpleProfiler, "pytorch": named.PyTorchProfiler}


@dataclass
class Translated:
    """Lightning's arguments as ``Fit`` needs them."""

    settings: dict[str, Any]
    callbacks: list[Any]
    """As the user knows them, in Lightning's order; ``ModelCheckpoint`` objects come last."""
    loggers: list[Any]
    val_check_interval: int | float | None = None
    """Validate after so many batches, or this fraction of an epoch's; ``None``: ``settings`` say when."""
    check_val_every_n_epoch: int | None = 1
    extra: list[Any] = field(default_factory=list)
    """Callbacks that stand for arguments, such as profilers."""


def translate(given: Mapping[str, Any]) -> Translated:
    """The ``given`` arguments of ``Trainer``, all of them.

    Raises:
        ValueError, TypeError: one that has no counterpart, or contradicts another; the message names what to use.
    """
    for name, neutral in NEUTRAL.items():
        if not any(given[name] is value or given[name] == value for value in neutral):
            raise ValueError(f"Trainer({name}={given[name]!r}) has no counterpart{hint(name, ())}")
    settings = {name: given[name] for name in SAME if given[name] is not None}
    settings |= _limits(given)
    if given["devices"] != "auto":
        settings["devices"] = "auto" if given["devices"] in (-1, "-1") else given["devices"]
    if given["strategy"] != "auto":
        settings["strategy"] = strategy(given["strategy"])
    loggers = _loggers(given)
    root = Path(given["default_root_dir"] or ".")
    settings["root_dir"] = root / "lightning_logs" if loggers else root
    found = Translated(settings, [], loggers)
    _validation(given, found)
    _callbacks(given, found)
    if given["barebones"]:
        settings |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    return found


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    epochs, steps, seconds = given["max_epochs"], given["max_steps"], given["max_time"]
    if epochs is None and steps == -1:
        epochs = 1000 if seconds is None else -1
    found: dict[str, Any] = {}
    if seconds is not None:
        found["max_time"] = timedelta(**seconds) if isinstance(seconds, Mapping) else seconds
    if epochs not in (None, -1):
        found["max_epochs"] = epochs
    if steps != -1:
        found["max_steps"] = steps
    elif "max_epochs" not in found and "max_time" not in found:
        found["max_steps"] = NEVER
    return found


def _loggers(given: Mapping[str, Any]) -> list[Any]:
    asked = given["logger"]
    if given["barebones"] or given["fast_dev_run"] or asked is False:
        return []
    if asked in (None, True):
        there = importlib.util.find_spec("tensorboard") or importlib.util.find_spec("tensorboardX")
        kind = known_loggers.TensorBoardLogger if there else known_loggers.CSVLogger
        return [kind(save_dir=None)]
    return list(asked) if isinstance(asked, (list, tuple, set)) else [asked]


def _validation(given: Mapping[str, Any], found: Translated) -> None:
    interval, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    if isinstance(interval, Mapping):
        interval = timedelta(**interval)
    if isinstance(interval, (str, timedelta)):
        if epochs not in (None, 1):
            raise ValueError(
                f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs}): a time has no epochs here; leave the second out"
            )
        found.settings["val_every"] = parse(interval)
        return
    if epochs is None and (isinstance(interval, float) or interval is None):
        raise ValueError(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={interval!r}): give val_check_interval as an int, a number of batches"
        )
    found.check_val_every_n_epoch = epochs
    if interval is None or (interval == 1.0 and isinstance(interval, float)):
        found.settings["val_every"] = f"{epochs} epochs"
        return
    if interval == 0:
        raise ValueError("Trainer(val_check_interval=0): give limit_val_batches=0 to switch validation off")
    found.val_check_interval = interval


def _callbacks(given: Mapping[str, Any], found: Translated) -> None:
    """Lightning's default callbacks beside those given: bar, summary, the given ones, checkpoints last."""
    asked = given["callbacks"]
    mine = [] if asked is None else list(asked) if isinstance(asked, (list, tuple)) else [asked]
    bare = given["barebones"]

    def wanted(name: str, kind: type) -> bool:
        there, on = any(isinstance(each, kind) for each in mine), given[name]
        if bare and (on or there):
            raise ValueError(f"Trainer(barebones=True) with {name} or a {kind.__name__}: leave one of them out")
        if on is False and there:
            raise ValueError(f"Trainer({name}=False) with a {kind.__name__} in callbacks: leave one of them out")
        return on is not False and not there and not bare

    if wanted("enable_progress_bar", named.ProgressBar):
        mine.insert(0, named.RichProgressBar())
    if wanted("enable_model_summary", named.ModelSummary):
        mine.append(named.ModelSummary())
    if wanted("enable_checkpointing", named.Checkpoint):
        mine.append(named.ModelCheckpoint())
    for each in [each for each in mine if isinstance(each, named.GradientAccumulationScheduler)]:
        if given["accumulate_grad_batches"] != 1:
            raise ValueError("give accumulate_grad_batches or a GradientAccumulationScheduler, not both")
        found.settings["accumulate_grad_batches"] = each.scheduling
    for each in [each for each in mine if isinstance(each, named.Timer)]:
        each.limit(found.settings)
    profiler = given["profiler"]
    if profiler is not None:
        if isinstance(profiler, str) and profiler not in PROFILERS:
            raise ValueError(
                f"Trainer(profiler={profiler!r}): possible are {', '.join(PROFILERS)}, or a profiler object"
            )
        found.extra.append(PROFILERS[profiler]() if isinstance(profiler, str) else profiler)
    last = [each for each in mine if isinstance(each, named.Checkpoint)]
    found.callbacks = [each for each in mine if each not in last] + last


class InBatches(Every):
    """``val_check_interval`` and ``check_val_every_n_epoch`` as Lightning has them: in micro-batches of an epoch, or of all epochs."""

    def __init__(self, run: Run, interval: int | float, epochs: int | None) -> None:
        super().__init__(None)
        self.run, self.interval, self.epochs = run, interval, epochs

    def _batches(self) -> int | None:
        """Micro-batches between two validations; ``None``: only at an epoch's end."""
        length = self.run.num_train_batches
        if isinstance(self.interval, int):
            if self.epochs is not None and length is not None and self.interval > length:
                raise ValueError(
                    f"val_check_interval={self.interval} is larger than the epoch's {length} batches: give check_val_every_n_epoch=None to "
                    "count over epochs, or a smaller one"
                )
            return self.interval
        return None if length is None else max(1, int(length * self.interval))

    def _window(self, batches: int) -> int:
        window = self.run.window_at(self.run.epoch)
        length = self.run.num_train_batches
        if batches % window and batches != length:
            raise ValueError(
                f"validation every {batches} batches, with {window} batches in an optimizer step: a validation comes after a step; give "
                f"val_check_interval as a multiple of {window}"
            )
        return window

    def start(self, step: int, epochs: Any = None) -> None:
        batches = self._batches()
        if batches is not None:
            self._window(batches)

    def due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Any = None) -> bool:
        state, batches = self.run.state, self._batches()
        if self.epochs is not None and (state.epoch + 1) % self.epochs:
            return False
        if epoch_end is not None and (batches is None or self.run.num_train_batches is None):
            return True
        done = state.batch_idx if self.epochs is not None else state.batches
        reached = batches is not None and done > 0 and done % batches == 0
        if reached:
            self._last_step = step
        return reached

    def next_step(self, step: int) -> int:
        batches, state = self._batches(), self.run.state
        if batches is None:
            return NEVER
        if not self.run.module.automatic_optimization:
            return step  # its steps are not the batches'
        done = state.batch_idx if self.epochs is not None else state.batches
        left = batches - done % batches
        return step + max(1, left // self._window(batches))
