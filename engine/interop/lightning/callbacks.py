"""Lightning's callbacks: those of the package ``callbacks`` under its names and arguments."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import callbacks as own
from engine.config.duration import parse
from engine.interop.lightning.callback import THEIRS, Callback, Wrapped
from engine.interop.lightning.refused import leave_out, refused_class
from engine.utils.log import logger

_FIELD = re.compile(r"\{([^}:!\[]+)")


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""


class ModelCheckpoint(Wrapped, Checkpoint, of=own.ModelCheckpoint):
    """Lightning's arguments of ``callbacks.ModelCheckpoint``. A checkpoint is a complete one, a folder named as Lightning's file would be."""

    FILE_EXTENSION = ".ckpt"
    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_NAME_LAST = "last"

    def __init__(
        self,
        dirpath: Any = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        if save_weights_only:
            logger.warning(
                "ModelCheckpoint(save_weights_only=True): checkpoints are complete here; export weights with 'fit checkpoint export'"
            )
        when = [f"{every_n_train_steps} steps" if every_n_train_steps else None, train_time_interval]
        when += [f"{every_n_epochs} epochs" if every_n_epochs else None]
        every = [each for each in when if each is not None]
        if len(every) > 1:
            raise ValueError(f"ModelCheckpoint saves every {every[0]} or every {every[1]}: give one of them")
        if not every and every_n_epochs is None and not every_n_train_steps:
            every = ["1 epochs"]
        name = "{epoch}-{step}" if filename is None else filename
        name = _FIELD.sub(r"\1={\1", name) if auto_insert_metric_name else name
        self.idle = not save_top_k and not save_last
        """Nothing is to be kept: the trainer leaves it out."""
        self.wrap(
            every[0] if every else None, monitor, mode, save_top_k, bool(save_last) or self.idle, dirpath=dirpath,
            filename=f"{name}{self.FILE_EXTENSION}", asynchronous=False,
        )  # fmt: skip
        self.save_top_k, self.save_weights_only, self._given_last = save_top_k, save_weights_only, save_last
        self._on_train_end, self._run = save_on_train_epoch_end, None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._run = trainer.run
        self.ours.setup(trainer.run, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._on_train_end and self.monitor is not None and trainer.run.val_loaders:
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}, save_on_train_epoch_end=True): with validation a score counts after the "
                "validation; leave the second out"
            )
        self.ours.on_train_start(trainer.run, pl_module)

    @property
    def best_k_models(self) -> dict[str, Any]:
        """The checkpoints that are kept and their scores."""
        measured = {step: score for step, score in self.scores.items() if score is not None or self.monitor is None}
        return {self._path(step): None if score is None else torch.tensor(score) for step, score in measured.items()}

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without ``monitor`` the newest. Empty if there is none."""
        best = self._ranked(self.scores)
        return self._path(best[0]) if best and (self.monitor is None or self.scores[best[0]] is not None) else ""

    @property
    def kth_best_model_path(self) -> str:
        """The worst of those that are kept."""
        return next(reversed([self._path(step) for step in self._ranked(self.scores)]), "")

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """Its ``monitor``."""
        return self.best_k_models.get(self.best_model_path)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, with ``save_last``."""
        return self._path(max(self.names)) if self.names and self._given_last else ""

    def _path(self, step: int) -> str:
        return "" if self._run is None else str(self._run.checkpoint_path(self.names[step]))


class EarlyStopping(Wrapped, of=own.EarlyStopping):
    """Lightning's arguments of ``callbacks.EarlyStopping``; the reason is logged, and stands in ``Result.stop_reason``."""

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.strict = strict
        leave_out(
            "EarlyStopping", {"check_on_train_epoch_end": bool(check_on_train_epoch_end)},
            {"check_on_train_epoch_end": (False, "it checks after each validation, or without validation after each epoch")},
        )  # fmt: skip
        self.wrap(monitor, abs(min_delta), patience, mode, check_finite, stopping_threshold, divergence_threshold)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.strict or self.monitor in trainer.run.metrics:
            self.ours.on_validation_end(trainer.run, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.strict or self.monitor in trainer.run.metrics:
            self.ours.on_train_epoch_end(trainer.run, pl_module)


class LearningRateMonitor(Wrapped, of=own.LearningRateMonitor):
    """The arguments of ``callbacks.LearningRateMonitor``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.wrap(*args, **kwargs)


class DeviceStatsMonitor(Wrapped, of=own.DeviceStatsMonitor):
    """The arguments of ``callbacks.DeviceStatsMonitor``."""

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.wrap(cpu_stats)


_ON_CPU = {"device": (None, "averages are on the device of the weights")}


class WeightAveraging(Wrapped, of=own.WeightAveraging, methods=("should_update",)):
    """Lightning's arguments of ``callbacks.WeightAveraging``."""

    def __init__(self, device: Any = None, use_buffers: bool = True, **options: Any) -> None:
        leave_out(type(self).__name__, {"device": device}, _ON_CPU)
        self.wrap(use_buffers=use_buffers, **options)


class EMAWeightAveraging(Wrapped, of=own.EMA, methods=("should_update",)):
    """Lightning's arguments of ``callbacks.EMA``."""

    def __init__(
        self, device: Any = None, use_buffers: bool = True, decay: float = 0.999, *args: Any, **options: Any
    ) -> None:
        leave_out("EMAWeightAveraging", {"device": device}, _ON_CPU)
        names = ("update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch")
        self.wrap(decay, use_buffers=use_buffers, **dict(zip(names, args, strict=False)), **options)


class StochasticWeightAveraging(Wrapped, of=own.SWA):
    """Lightning's arguments of ``callbacks.SWA``; averages are on the device of the weights."""

    def __init__(self, *args: Any, device: Any = None, **options: Any) -> None:
        self.wrap(*args, **options)


class BaseFinetuning(Wrapped, of=own.BaseFinetuning, methods=("freeze_before_training", "finetune_function")):
    """``callbacks.BaseFinetuning``, with the same methods to define."""

    def __init__(self) -> None:
        self.wrap()


class BackboneFinetuning(Wrapped, of=own.BackboneFinetuning):
    """Lightning's arguments of ``callbacks.BackboneFinetuning``."""

    def __init__(
        self, *args: Any, verbose: bool = False, rounding: int = 12, initial_denom_lr: float = 10.0, **options: Any
    ) -> None:
        self.wrap(*args, **options)


class ModelPruning(Wrapped, of=own.Pruning):
    """Lightning's arguments of ``callbacks.Pruning``."""

    def __init__(
        self, pruning_fn: Any, parameters_to_prune: Any = (), parameter_names: Any = None, **options: Any
    ) -> None:
        leave_out(
            "ModelPruning", {"use_lottery_ticket_hypothesis": True, "resample_parameters": False, "prune_on_train_epoch_end": True, **options},
            {
                "use_lottery_ticket_hypothesis": (False, "weights are not put back to their first values; give False"),
                "resample_parameters": (False, "it belongs to use_lottery_ticket_hypothesis"),
                "prune_on_train_epoch_end": (True, "pruning is at an epoch's start"),
            },
        )  # fmt: skip
        if "make_pruning_permanent" in options:
            options["make_permanent"] = options.pop("make_pruning_permanent")
        for name in ("use_lottery_ticket_hypothesis", "resample_parameters", "prune_on_train_epoch_end", "verbose"):
            options.pop(name, None)
        self.wrap(
            pruning_fn,
            parameters_to_prune=parameters_to_prune,
            parameter_names=parameter_names or ("weight",),
            **options,
        )


class ModelSummary(Wrapped, of=own.ModelSummary):
    """Lightning's arguments of ``callbacks.ModelSummary``."""

    def __init__(self, max_depth: int = 1, **options: Any) -> None:
        self.idle = max_depth == 0
        self.wrap(max_depth, measure=False)


RichModelSummary = ModelSummary


class ProgressBar(Callback):
    """The base of progress bars."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        made = [name for name in vars(cls) if name.startswith("init_") or name in ("get_metrics", "configure_columns")]
        if made:
            raise TypeError(
                f"{cls.__name__}.{made[0]} would never be called: override bar(shown, screen) of callbacks.ProgressBar"
            )


class RichProgressBar(ProgressBar, Wrapped, of=own.RichProgressBar):
    """``callbacks.RichProgressBar``; ``refresh_rate=0`` switches it off, others are Lightning's in batches: here it is drawn by time."""

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None, console_kwargs: Any = None
    ) -> None:
        leave_out(
            "RichProgressBar",
            {"theme": theme},
            {"theme": (None, "give callbacks.RichProgressBar(console=Console(theme=...))")},
        )
        self.idle = refresh_rate == 0
        self.wrap()


class TQDMProgressBar(ProgressBar, Wrapped, of=own.TQDMProgressBar):
    """``callbacks.TQDMProgressBar``, as :class:`RichProgressBar`."""

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        self.idle = refresh_rate == 0
        self.wrap()


class GradientAccumulationScheduler(Callback):
    """A schedule ``{first epoch: micro-batches}``, which the trainer makes its ``accumulate_grad_batches``."""

    def __init__(self, scheduling: dict[int, int]) -> None:
        self.scheduling = dict(scheduling)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.run.settings.accumulate_grad_batches != self.scheduling:
            raise ValueError(f"GradientAccumulationScheduler: give Fit(accumulate_grad_batches={self.scheduling})")


class Timer(Callback):
    """Stops the training after a ``duration`` of it, resumed parts included, at a step's or an epoch's end (``interval``)."""

    def __init__(self, duration: Any = None, interval: str = "step", verbose: bool = True) -> None:
        if interval not in ("step", "epoch"):
            raise ValueError(f"Timer(interval={interval!r}): it must be 'step' or 'epoch'")
        found = parse(timedelta(**duration) if isinstance(duration, dict) else duration)
        self._seconds, self._interval, self._run = None if found is None else found.value, interval, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._run = trainer.run

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds of training so far."""
        return 0.0 if self._run is None else self._run.elapsed_s

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left; ``None`` without a ``duration``."""
        return None if self._seconds is None else self._seconds - self.time_elapsed()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        left = self.time_remaining()
        if left is not None and left <= 0:
            trainer.run.stop(f"Timer: {self._seconds:g} s are over")


class LambdaCallback(Callback):
    """Functions as a callback: ``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``."""

    def __init__(self, **functions: Any) -> None:
        for event, function in functions.items():
            if event not in THEIRS:
                raise TypeError(f"LambdaCallback: {event!r} is not an event; events: {', '.join(THEIRS)}")
            if function is not None:
                setattr(self, event, function)


class BasePredictionWriter(Callback):
    """Define ``write_on_batch_end`` or ``write_on_epoch_end``, with Lightning's arguments. ``batch_indices`` are ``None``: batches are
    dealt to the ranks in turn, and batch ``i`` of a rank is number ``i * world_size + rank`` in the data's order."""

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(f"write_interval={write_interval!r}: it must be 'batch', 'epoch' or 'batch_and_epoch'")
        self.interval, self._kept = write_interval, []

    def write_on_batch_end(self, *args: Any) -> None:
        """``(trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx)``"""
        raise NotImplementedError(f"{type(self).__name__} must define write_on_batch_end")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        """``predictions``: one entry a batch, or with several loaders one such list each."""
        raise NotImplementedError(f"{type(self).__name__} must define write_on_epoch_end")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._kept: list[list[Any]] = [[] for _ in trainer.run.num_eval_batches]

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if "batch" in self.interval:
            self.write_on_batch_end(trainer, pl_module, outputs, None, batch, batch_idx, dataloader_idx)
        if "epoch" in self.interval:
            self._kept[dataloader_idx].append(outputs)

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if "epoch" in self.interval:
            self.write_on_epoch_end(trainer, pl_module, self._kept[0] if len(self._kept) == 1 else self._kept, None)


class SimpleProfiler(Wrapped, of=own.SimpleProfiler):
    """The arguments of ``callbacks.SimpleProfiler``."""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        self.wrap(dirpath, filename, extended=extended)


class PyTorchProfiler(Wrapped, of=own.Profiler):
    """``callbacks.Profiler``; arguments are its own."""

    def __init__(self, **options: Any) -> None:
        self.wrap(**options)


_BEFORE = "call callbacks.{} before the training, and set what it finds"
BatchSizeFinder = refused_class("BatchSizeFinder", _BEFORE.format("find_batch_size(module, loader)"))
LearningRateFinder = refused_class("LearningRateFinder", _BEFORE.format("find_lr(module, loader)"))
OnExceptionCheckpoint = refused_class(
    "OnExceptionCheckpoint", "a ModelCheckpoint saves the last complete step after an exception"
)
SpikeDetection = refused_class("SpikeDetection", "use callbacks.SpikeGuard()")
ThroughputMonitor = refused_class("ThroughputMonitor", "use callbacks.ThroughputMonitor()")
AdvancedProfiler = refused_class("AdvancedProfiler", "use SimpleProfiler, PyTorchProfiler, or python -m cProfile")
