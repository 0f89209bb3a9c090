"""This library's callbacks under Lightning's names and arguments. An argument without a counterpart is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

import engine.callbacks as own
from engine.compat.checked_arguments import as_device, checking_arguments, with_arguments_of
from engine.compat.lightning.arguments import CALLBACKS
from engine.compat.lightning.callback import Callback
from engine.compat.lightning.events import EVENTS
from engine.compat.lightning.names import OF_CHECKPOINTS
from engine.compat.lightning.pickled_checkpoint import FILE, write_checkpoint
from engine.config.duration import NEVER
from engine.config.kinds import WholeNumber
from engine.config.settings import checked_setting
from engine.loop.run import Run
from engine.utils.log import logger

Device = torch.device | str | int | None
_FIELD = re.compile(r"\{([^}:!\[]+)")


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""


class ProgressBar(Callback):
    """The base of progress bars. A bar is redrawn at fixed times, whatever ``refresh_rate`` is; 0 switches it off."""


class LearningRateMonitor(Callback, own.LearningRateMonitor):
    """:class:`callbacks.LearningRateMonitor` with Lightning\'s arguments."""

    @with_arguments_of(own.LearningRateMonitor, CALLBACKS)
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None: ...


class DeviceStatsMonitor(Callback, own.DeviceStatsMonitor):
    """:class:`callbacks.DeviceStatsMonitor` with Lightning\'s arguments."""

    @with_arguments_of(own.DeviceStatsMonitor, CALLBACKS)
    def __init__(self, cpu_stats: bool | None = None) -> None: ...


class WeightAveraging(Callback, own.WeightAveraging):
    """:class:`callbacks.WeightAveraging` with Lightning\'s arguments."""

    @with_arguments_of(own.WeightAveraging, CALLBACKS)
    def __init__(self, device: Device = None, use_buffers: bool = True, **kwargs: Any) -> None: ...


class EMAWeightAveraging(Callback, own.EMA):
    """:class:`callbacks.EMA` with Lightning\'s arguments."""

    @with_arguments_of(own.EMA, CALLBACKS)
    def __init__(
        self, device: Device = None, use_buffers: bool = True, decay: float = 0.999, update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None, update_starting_at_epoch: int | None = None, **kwargs: Any,
    ) -> None: ...  # fmt: skip


class StochasticWeightAveraging(Callback, own.SWA):
    """:class:`callbacks.SWA` with Lightning\'s arguments."""

    @with_arguments_of(own.SWA, CALLBACKS)
    def __init__(
        self, swa_lrs: float | list[float], swa_epoch_start: int | float = 0.8, annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos", avg_fn: Callable[..., Any] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:  # fmt: skip
        as_device("StochasticWeightAveraging", device)


class BasePredictionWriter(Callback, own.BasePredictionWriter):
    """:class:`callbacks.BasePredictionWriter` with Lightning\'s arguments."""

    @with_arguments_of(own.BasePredictionWriter, CALLBACKS)
    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None: ...


class BaseFinetuning(Callback, own.BaseFinetuning):
    """:class:`callbacks.BaseFinetuning`."""


class BackboneFinetuning(Callback, own.BackboneFinetuning):
    """:class:`callbacks.BackboneFinetuning` with Lightning\'s arguments."""

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

    @with_arguments_of(own.RichProgressBar, CALLBACKS)
    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None, console_kwargs: dict[str, Any] | None = None
    ) -> None:  # fmt: skip
        self.idle = refresh_rate == 0


class TQDMProgressBar(ProgressBar, own.TQDMProgressBar):
    """:class:`callbacks.TQDMProgressBar` with Lightning\'s arguments."""

    @with_arguments_of(own.TQDMProgressBar, CALLBACKS)
    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        self.idle = refresh_rate == 0


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


class ModelCheckpoint(Checkpoint, own.ModelCheckpoint):
    """:class:`callbacks.ModelCheckpoint` with Lightning\'s arguments. A checkpoint is complete, in a folder named as Lightning names its file.

    ``torch.load`` does not open that folder, which ``best_model_path`` names: ``load_from_checkpoint`` and ``ckpt_path`` do; see :attr:`pickles`.
    """

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
        if save_weights_only:
            message = "ModelCheckpoint(save_weights_only=True): checkpoints are complete; 'fit checkpoint export' writes weights only"
            logger.warning(message)
        count = WholeNumber(0, NEVER, none="never")
        every_n_train_steps = count.normalized("ModelCheckpoint: every_n_train_steps", every_n_train_steps)
        every_n_epochs = count.normalized("ModelCheckpoint: every_n_epochs", every_n_epochs)
        is_default = all(interval is None for interval in (every_n_train_steps, train_time_interval, every_n_epochs))
        epochs = f"{1 if is_default else every_n_epochs} epochs" if is_default or every_n_epochs else None
        every: list[Any] = [interval for interval in (every_n_train_steps, train_time_interval, epochs) if interval]
        if len(every) > 1:
            raise ValueError(f"ModelCheckpoint saves every {every[0]} and every {every[1]}: give one of them")
        name = "{epoch}-{step}" if filename is None else filename
        name = _FIELD.sub(r"\1={\1", name) if auto_insert_metric_name else name
        self.idle = not save_top_k and not save_last
        self._has_last_path, self._at_train_epoch_end = save_last, save_on_train_epoch_end
        self._files: dict[int, Path] = {}
        folder = Path(dirpath) if isinstance(dirpath, PathLike) else dirpath
        options = (monitor, mode, save_top_k, bool(save_last) or self.idle, None, folder, name + self.FILE_EXTENSION)
        # Not asynchronous, so that a path exists as soon as it is named.
        own.ModelCheckpoint.__init__(self, next(iter(every), None), *options, asynchronous=False)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.pickles and "://" in str(trainer.run.checkpoint_path("x")):
            reason = "files are written beside checkpoints in a local folder: give one as dirpath"
            raise ValueError(f"ModelCheckpoint.pickles = True: {reason}")
        own.ModelCheckpoint.setup(self, trainer.run, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._at_train_epoch_end and self.monitor is not None and trainer.run.val_loaders:
            reason = CALLBACKS["ModelCheckpoint"]["save_on_train_epoch_end"].with_validation
            raise ValueError(f"ModelCheckpoint(save_on_train_epoch_end=True): {reason}")
        own.ModelCheckpoint.on_train_start(self, trainer.run, pl_module)
        self._files = {}

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
        return {path: None if score is None else torch.tensor(score) for path, score in super().best_k_models.items()}

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


class EarlyStopping(Callback, own.EarlyStopping):
    """:class:`callbacks.EarlyStopping` with Lightning\'s arguments."""

    @checking_arguments()
    def __init__(
        self, monitor: str, min_delta: float = 0.0, patience: int | float = 3, verbose: bool = False, mode: Literal["min", "max"] = "min",
        strict: bool = True, check_finite: bool = True, stopping_threshold: float | None = None,
        divergence_threshold: float | None = None, check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        thresholds = check_finite, stopping_threshold, divergence_threshold
        own.EarlyStopping.__init__(self, monitor, abs(min_delta), patience, mode, *thresholds, strict)
        self._at_train_epoch_end = check_on_train_epoch_end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._at_train_epoch_end and trainer.run.val_loaders:
            reason = CALLBACKS["EarlyStopping"]["check_on_train_epoch_end"].with_validation
            raise ValueError(f"EarlyStopping(check_on_train_epoch_end=True): {reason}")
        own.EarlyStopping.on_train_start(self, trainer.run, pl_module)


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
