"""``Trainer``'s arguments, with Lightning's names, values and defaults, as settings and callbacks of :class:`engine.Fit`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.duration import NEVER, Every
from engine.config.from_lightning import arguments as config
from engine.interop.lightning import callbacks as named
from engine.interop.lightning.loggers import CSVLogger, TensorBoardLogger
from engine.loop.run import Run

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
    settings, batches = config.settings(given)
    loggers, profiler = _loggers(given), given["profiler"]
    placed = next((each.root_dir for each in loggers if getattr(each, "root_dir", None) is not None), None)
    if loggers:
        settings["root_dir"] = placed or settings["root_dir"] / "lightning_logs"
    if isinstance(profiler, str):
        if profiler not in _PROFILERS:
            raise ValueError(
                f"Trainer(profiler={profiler!r}): possible are {', '.join(_PROFILERS)}, or one of these objects"
            )
        profiler = _PROFILERS[profiler]()
    profilers = [] if profiler is None else [profiler]
    return Translated(settings, loggers, _callbacks(given, settings), profilers, batches)


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
