"""This library's callbacks under Lightning's names and arguments. An argument without a counterpart is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

import engine.callbacks as own
from engine.compat.checked_arguments import as_device, checking_arguments, with_arguments_of
from engine.compat.lightning.arguments import CALLBACKS
from engine.compat.lightning.bar_attributes import BarAttributes
from engine.compat.lightning.callback import Callback
from engine.compat.lightning.checkpoint_attributes import CheckpointAttributes
from engine.compat.lightning.epoch_ends import acts_at_epoch_ends, has_validation
from engine.compat.lightning.events import EVENTS
from engine.compat.lightning.exception_checkpoint import SavesOnException
from engine.compat.lightning.finetuning_functions import FinetuningFunctions
from engine.compat.lightning.names import OF_CHECKPOINTS
from engine.compat.lightning.pickled_checkpoint import FILE, write_checkpoint
from engine.compat.lightning.searches import BatchSizeFinder as BatchSizeFinder
from engine.compat.lightning.searches import LearningRateFinder as LearningRateFinder
from engine.compat.lightning.stopping_reason import EarlyStoppingReason as EarlyStoppingReason
from engine.compat.lightning.stopping_reason import NamesReason
from engine.compat.lightning.timer import Interval as Interval
from engine.compat.lightning.timer import Timer as Timer
from engine.config.duration import NEVER
from engine.config.kinds import WholeNumber
from engine.config.settings import checked_setting
from engine.loop.run import Run
from engine.utils.log import logger
from engine.utils.paths import expanded

Device = torch.device | str | int | None
_FIELD = re.compile(r"\{([^}:!\[]+)")


def _absolute(dirpath: str | PathLike[str] | None) -> str | Path | None:
    """The folder of checkpoints as Lightning shows it: an absolute path, or the URL."""
    if dirpath is None or "://" in str(dirpath):
        return dirpath if dirpath is None else str(dirpath)
    return os.path.realpath(expanded(dirpath))


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""


class OnExceptionCheckpoint(SavesOnException, Checkpoint):
    """Saves the last complete step when an exception ends a training."""


class ProgressBar(BarAttributes, Callback):
    """The base of progress bars. A bar is redrawn at fixed times, whatever ``refresh_rate`` is; 0 switches it off."""

    needed: tuple[str, ...] = ("teardown",)

    shows_progress = True


class LearningRateMonitor(Callback, own.LearningRateMonitor):
    """:class:`callbacks.LearningRateMonitor` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("setup", "on_train_end", "on_validation_start", "on_validation_end")

    @with_arguments_of(own.LearningRateMonitor, CALLBACKS)
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        own.LearningRateMonitor.on_train_start(self, trainer.run, pl_module)
        self.lrs = {}
        for interval in ("step", "epoch"):
            self._values(interval)  # notes the names
        self.lrs = {name: [] for name in self.lrs}
        self.last_momentum_values = {f"{name}-momentum": None for name in self.lrs}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in self.lrs}

    def _values_of_group(self, name: str, group: dict[str, Any]) -> dict[str, float]:
        values = super()._values_of_group(name, group)
        self.lrs.setdefault(name, []).append(values[name])
        if self.log_momentum:
            self.last_momentum_values[f"{name}-momentum"] = values[f"{name}-momentum"]
        if self.log_weight_decay:
            self.last_weight_decay_values[f"{name}-weight_decay"] = values[f"{name}-weight_decay"]
        return values


class DeviceStatsMonitor(Callback, own.DeviceStatsMonitor):
    """:class:`callbacks.DeviceStatsMonitor` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_train_start", "on_train_end", "on_validation_start", "on_validation_end")

    @with_arguments_of(own.DeviceStatsMonitor, CALLBACKS)
    def __init__(self, cpu_stats: bool | None = None) -> None: ...


class WeightAveraging(Callback, own.WeightAveraging):
    """:class:`callbacks.WeightAveraging` with Lightning\'s arguments."""

    needed: tuple[str, ...] = (
        "on_train_start",
        "on_validation_start",
        "on_validation_end",
        "on_fit_end",
        "on_exception",
        "teardown",
    )

    @with_arguments_of(own.WeightAveraging, CALLBACKS)
    def __init__(self, device: Device = None, use_buffers: bool = True, **kwargs: Any) -> None: ...


class EMAWeightAveraging(Callback, own.EMA):
    """:class:`callbacks.EMA` with Lightning\'s arguments."""

    needed: tuple[str, ...] = (
        "on_train_start",
        "on_train_epoch_start",
        "on_validation_start",
        "on_validation_end",
        "on_fit_end",
        "on_exception",
        "teardown",
    )

    @with_arguments_of(own.EMA, CALLBACKS)
    def __init__(
        self, device: Device = None, use_buffers: bool = True, decay: float = 0.999, update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None, update_starting_at_epoch: int | None = None, **kwargs: Any,
    ) -> None: ...  # fmt: skip

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Update after steps from ``update_starting_at_step`` on, in every epoch, and also at the ends of epochs from ``update_starting_at_epoch``
        on, as Lightning does."""
        if step_idx is not None:
            return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start


class StochasticWeightAveraging(Callback, own.SWA):
    """:class:`callbacks.SWA` with Lightning\'s arguments."""

    needed: tuple[str, ...] = (
        "on_train_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_end",
        "on_fit_end",
        "on_exception",
        "teardown",
    )

    @with_arguments_of(own.SWA, CALLBACKS)
    def __init__(
        self, swa_lrs: float | list[float], swa_epoch_start: int | float = 0.8, annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos", avg_fn: Callable[..., Any] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:  # fmt: skip
        as_device("StochasticWeightAveraging", device)


class BasePredictionWriter(Callback, own.BasePredictionWriter):
    """:class:`callbacks.BasePredictionWriter` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_predict_start",)

    @with_arguments_of(own.BasePredictionWriter, CALLBACKS)
    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None: ...


class BaseFinetuning(FinetuningFunctions, Callback, own.BaseFinetuning):
    """:class:`callbacks.BaseFinetuning`."""

    needed: tuple[str, ...] = ("on_load_checkpoint", "teardown")


class BackboneFinetuning(FinetuningFunctions, Callback, own.BackboneFinetuning):
    """:class:`callbacks.BackboneFinetuning` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_load_checkpoint", "on_train_batch_end", "teardown")

    @with_arguments_of(own.BackboneFinetuning, CALLBACKS)
    def __init__(
        self, unfreeze_backbone_at_epoch: int = 10, lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 0.1, backbone_initial_lr: float | None = None, should_align: bool = True,
        initial_denom_lr: float = 10.0, train_bn: bool = True, verbose: bool = False, rounding: int = 12,
    ) -> None: ...  # fmt: skip


class ModelSummary(Callback, own.ModelSummary):
    """:class:`callbacks.ModelSummary` with Lightning\'s arguments."""

    @with_arguments_of(own.ModelSummary, CALLBACKS, measure=False)
    def __init__(self, max_depth: int = 1) -> None: ...


class RichProgressBar(ProgressBar, own.RichProgressBar):
    """:class:`callbacks.RichProgressBar` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_train_end", "teardown")

    @with_arguments_of(own.RichProgressBar, CALLBACKS)
    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None, console_kwargs: dict[str, Any] | None = None
    ) -> None:  # fmt: skip
        self.refresh_rate, self.idle = refresh_rate, refresh_rate == 0


class TQDMProgressBar(ProgressBar, own.TQDMProgressBar):
    """:class:`callbacks.TQDMProgressBar` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_exception", "teardown")

    @with_arguments_of(own.TQDMProgressBar, CALLBACKS)
    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        self.refresh_rate = max(refresh_rate, int(os.environ.get("TQDM_MINITERS", "0")))
        self.idle = self.refresh_rate == 0


class ServableModuleValidator(Callback, own.ServableModuleValidator):
    """:class:`callbacks.ServableModuleValidator` with Lightning\'s arguments."""

    @with_arguments_of(own.ServableModuleValidator, CALLBACKS)
    def __init__(
        self, optimization: str | None = None, server: str = "fastapi", host: str = "127.0.0.1", port: int = 8080,
        timeout: int = 20, exit_on_failure: bool = True,
    ) -> None: ...  # fmt: skip


class SimpleProfiler(Callback, own.SimpleProfiler):
    """:class:`callbacks.SimpleProfiler` with Lightning\'s arguments."""

    @with_arguments_of(own.SimpleProfiler, CALLBACKS)
    def __init__(
        self, dirpath: str | PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None: ...


class PyTorchProfiler(Callback, own.Profiler):
    """:class:`callbacks.Profiler`, with its arguments."""

    @with_arguments_of(own.Profiler, CALLBACKS)
    def __init__(
        self, dirpath: str | PathLike[str] | None = None, filename: str | None = None, group_by_input_shapes: bool = False,
        emit_nvtx: bool = False, export_to_chrome: bool = True, row_limit: int = 20, sort_by_key: str | None = None,
        record_module_names: bool = True, table_kwargs: dict[str, Any] | None = None, **profiler_kwargs: Any,
    ) -> None: ...  # fmt: skip


RichModelSummary = ModelSummary
ServableModule = own.ServableModule
Profiler = Callback


class ModelCheckpoint(CheckpointAttributes, Checkpoint, own.ModelCheckpoint):
    """:class:`callbacks.ModelCheckpoint` with Lightning\'s arguments. A checkpoint is complete, in a folder named as Lightning names its file.

    ``torch.load`` does not open that folder, which ``best_model_path`` names: ``load_from_checkpoint`` and ``ckpt_path`` do; see :attr:`pickles`.
    """

    needed: tuple[str, ...] = ("on_train_start", "on_train_end", "on_fit_end")

    FILE_EXTENSION = ".ckpt"
    pickles = False
    """With ``ModelCheckpoint.pickles = True``, each checkpoint that remains at the end of a training is also written as a file beside its folder:
    weights, hyperparameters and counters in Lightning's format, without optimizers. ``best_model_path`` and the like then name the files, for
    programs that ``torch.load`` them; resume from the folder."""

    @checking_arguments()
    def __init__(
        self, dirpath: str | PathLike[str] | None = None, filename: str | None = None, monitor: str | None = None,
        verbose: bool = False, save_last: bool | Literal["link"] | None = None, save_top_k: int = 1,
        save_on_exception: bool = False, save_weights_only: bool = False, mode: Literal["min", "max"] = "min", auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None, train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None, save_on_train_epoch_end: bool | None = None, enable_version_counter: bool = True,
    ) -> None:  # fmt: skip
        # Not when the class is defined: packages that define such a subclass are also imported for other purposes.
        for name in OF_CHECKPOINTS:
            if hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} defines {name}, which is not called: {OF_CHECKPOINTS[name]}")
        self.keep_arguments(locals())
        if save_weights_only:
            message = "ModelCheckpoint(save_weights_only=True): checkpoints are complete; 'fit checkpoint export' writes weights only"
            logger.warning(message)
        count = WholeNumber(0, NEVER, none="never")
        every_n_train_steps = count.normalized("ModelCheckpoint: every_n_train_steps", every_n_train_steps)
        every_n_epochs = count.normalized("ModelCheckpoint: every_n_epochs", every_n_epochs)
        is_default = all(interval is None for interval in (every_n_train_steps, train_time_interval, every_n_epochs))
        if train_time_interval is not None and not train_time_interval:
            train_time_interval = timedelta(microseconds=1)  # at each opportunity
        self._epochs = 1 if is_default else every_n_epochs or 0
        epochs = f"{self._epochs} epochs" if self._epochs else None
        every: list[Any] = [interval for interval in (every_n_train_steps, train_time_interval, epochs) if interval]
        if len(every) > 1:
            raise ValueError(f"ModelCheckpoint saves every {every[0]} and every {every[1]}: give one of them")
        name = "{epoch}-{step}" if filename is None else filename
        name = _FIELD.sub(r"\1={\1", name) if auto_insert_metric_name else name
        self.idle = not save_top_k and not save_last
        self._has_last_path, self._at_train_epoch_end = save_last, save_on_train_epoch_end
        self._after_validations = False
        self._files: dict[int, Path] = {}
        self._interval = next(iter(every), None)
        folder = _absolute(dirpath)
        options = (monitor, mode, save_top_k, bool(save_last) or self.idle, None, folder, name + self.FILE_EXTENSION)
        # Not asynchronous, so that a path exists as soon as it is named.
        own.ModelCheckpoint.__init__(self, self._interval, *options, asynchronous=False)
        self._dirpath_argument = self.dirpath

    @property
    def checkpoints_in(self) -> str | Path | None:
        return self._dirpath_argument

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.pickles and "://" in str(trainer.run.checkpoint_path("x")):
            reason = "files are written beside checkpoints in a local folder: give one as dirpath"
            raise ValueError(f"ModelCheckpoint.pickles = True: {reason}")
        self.dirpath = self._dirpath_argument
        own.ModelCheckpoint.setup(self, trainer.run, pl_module, stage)
        self.dirpath = (self._storage or trainer.run.checkpoints.folder.storage).root

    def show_folder(self, run: Run) -> None:
        """Show the folder of checkpoints in a ``run`` in which this callback saves nothing."""
        self.dirpath = self._dirpath_argument or run.checkpoints.folder.storage.root

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        at_epoch_ends = self._at_train_epoch_end
        if at_epoch_ends is None and trainer.check_val_every_n_epoch == 1 and not has_validation(trainer.run):
            at_epoch_ends = True
        self._after_validations = bool(self._epochs) and not acts_at_epoch_ends(
            self, "save_on_train_epoch_end", at_epoch_ends, trainer
        )
        self._every_argument = None if self._after_validations else self._interval
        own.ModelCheckpoint.on_train_start(self, trainer.run, pl_module)
        self._files = {}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        run: Run = trainer.run
        if not self._after_validations:
            own.ModelCheckpoint.on_validation_end(self, run, pl_module)
        elif self._training and run.step and not (run.epoch + 1) % self._epochs and self._lacks_score(run.step):
            self._save(run)

    def _lacks_score(self, step: int) -> bool:
        """Whether no checkpoint of ``step`` is kept, or one that was saved before its validation."""
        return step not in self.scores or (self.monitor is not None and self.scores[step] is None)

    def _is_candidate(self, run: Run) -> bool:
        return False

    def _save(self, run: Run, last: bool = False) -> None:
        names = dict(self.names)
        own.ModelCheckpoint._save(self, run, last)
        if run.is_main_process and self.names.get(run.step) != names.get(run.step):
            self._tell_loggers(run)

    def _tell_loggers(self, run: Run) -> None:
        """Call ``after_save_checkpoint`` of the loggers that have it. Its errors are logged, as any error of a logger, and the training goes on."""
        for entry in run.trainer.loggers:
            after_save = getattr(entry, "after_save_checkpoint", None)
            if after_save is None:
                continue
            try:
                after_save(self)
            except Exception:
                logger.exception("%s.after_save_checkpoint failed", type(entry).__name__)

    def _saves_at_end(self, run: Run) -> bool:
        n, is_cut = self._epochs, not run.state.epoch_done
        is_epoch_due = is_cut and n and not self._after_validations and not (run.state.epoch + 1) % n
        is_due = run.preempted or is_epoch_due or (self._has_last_path and not self.names)
        return bool(is_due) and own.ModelCheckpoint._saves_at_end(self, run)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.pickles:
            files = {step: Path(FILE.format(self._path(step))) for step in self.names}
            if trainer.is_global_zero:
                for step, file in files.items():
                    write_checkpoint(file, self._path(step))
            trainer.strategy.barrier()
            self._files = files

    @property
    def best_k_models(self) -> dict[str, Any]:
        """Path -> score of the ``save_top_k`` best checkpoints, best first; empty without ``monitor``, as in Lightning."""
        if self.monitor is None:
            return {}
        ranked = super().best_k_models.items()
        scores = {path: None if score is None else self._as_score(score) for path, score in ranked}
        return scores if self.save_top_k == -1 else dict(islice(scores.items(), self.save_top_k))

    @property
    def best_model_path(self) -> str:
        """The best checkpoint's path, or without ``monitor`` the newest one's; empty if there is none, or with ``save_top_k=0``."""
        if self.monitor is None and self.names and self.save_top_k:
            return self._path(max(self.names))
        return next(iter(self.best_k_models), "")

    @property
    def kth_best_model_path(self) -> str:
        """The path of the worst of the ``save_top_k`` kept checkpoints; empty while there are fewer."""
        return next(reversed(self.best_k_models), "") if len(self.best_k_models) == self.save_top_k else ""

    @property
    def kth_value(self) -> torch.Tensor:
        """The score of the checkpoint at :attr:`kth_best_model_path`; infinitely bad if there is none."""
        score = self.best_k_models.get(self.kth_best_model_path)
        return torch.tensor(torch.inf if self.mode == "min" else -torch.inf) if score is None else score

    @property
    def last_model_path(self) -> str:
        return super().last_model_path if self._has_last_path else ""

    def _name_without_metrics(self, run: Run) -> str:
        return own.ModelCheckpoint._name_without_metrics(self, run) + self.FILE_EXTENSION

    def _path(self, step: int) -> str:
        return str(self._files.get(step) or super()._path(step))


class EarlyStopping(NamesReason, Callback, own.EarlyStopping):
    """:class:`callbacks.EarlyStopping` with Lightning\'s arguments."""

    needed: tuple[str, ...] = ("on_train_start", "on_train_end")

    _stopped_epoch: int | None = None

    @checking_arguments()
    def __init__(
        self, monitor: str, min_delta: float = 0.0, patience: int | float = 3, verbose: bool = False, mode: Literal["min", "max"] = "min",
        strict: bool = True, check_finite: bool = True, stopping_threshold: float | None = None,
        divergence_threshold: float | None = None, check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        thresholds = check_finite, stopping_threshold, divergence_threshold
        own.EarlyStopping.__init__(self, monitor, abs(min_delta), patience, mode, *thresholds, strict)
        self._at_train_epoch_end, self._after_validations = check_on_train_epoch_end, False

    @property
    def stopped_epoch(self) -> int:
        """The epoch (from 0) in which this callback stopped the training; 0 if it did not."""
        return self._stopped_epoch or 0

    @stopped_epoch.setter
    def stopped_epoch(self, value: int | None) -> None:
        self._stopped_epoch = value

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._after_validations = not acts_at_epoch_ends(
            self, "check_on_train_epoch_end", self._at_train_epoch_end, trainer
        )
        own.EarlyStopping.on_train_start(self, trainer.run, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._training and self._after_validations:
            self._check(trainer.run)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        run: Run = trainer.run
        if self._training and not self._after_validations and not run.preempted:  # a resumed run ends the epoch
            self._check(run)


class GradientAccumulationScheduler(Callback):
    """A schedule ``{first epoch: micro-batches}`` of accumulation windows; ``Trainer`` passes it to ``Fit(accumulate_grad_batches=...)``."""

    @checking_arguments()
    def __init__(self, scheduling: dict[int, int]) -> None:
        self.scheduling = scheduling
        try:
            checked_setting("accumulate_grad_batches", scheduling)
        except ValueError as error:
            raise ValueError(f"GradientAccumulationScheduler(scheduling={scheduling}): {error}") from None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.run.settings.accumulate_grad_batches != self.scheduling:
            raise ValueError(f"GradientAccumulationScheduler: give Fit(accumulate_grad_batches={self.scheduling})")


class LambdaCallback(Callback):
    """A callback made of functions: ``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``."""

    @checking_arguments()
    def __init__(self, **functions: Callable[..., Any] | None) -> None:
        for event, function in functions.items():
            if event not in EVENTS:
                raise TypeError(f"LambdaCallback: {event!r} is not an event; events: {', '.join(EVENTS)}")
            if function is not None:
                setattr(self, event, function)
