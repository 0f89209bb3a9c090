"""Lightning's callbacks: this library's under its names and arguments. An argument without a counterpart is an error."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import new_class
from typing import Any

import torch

import engine.callbacks as own
from engine.compat.lightning.callback import EVENTS, Callback, listens
from engine.compat.lightning.names import CLASSES, OF_CALLBACKS
from engine.compat.lightning.pickled import write_checkpoint
from engine.compat.refusals import refusing, translated
from engine.utils.log import logger

_FIELD = re.compile(r"\{([^}:!\[]+)")


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""


class ProgressBar(Callback):
    """The base of progress bars. They are drawn by time, whatever ``refresh_rate`` is; 0 switches one off."""


def _named(name: str, of: Any, order: str = "", base: type = Callback, without: Any = None, **fixed: Any) -> Any:
    """``of`` under Lightning's ``name``, with its positional arguments in Lightning's ``order``, and our ``fixed`` ones."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = translated(name, order, args, kwargs, OF_CALLBACKS | (without or {}))
        of.__init__(self, **given, **fixed)
        self.idle = base is ProgressBar and kwargs.get("refresh_rate", [*args, 1][0]) == 0

    doc = f"Lightning's arguments of :class:`callbacks.{of.__name__}`."
    content = {"__init__": init, "__doc__": doc, "__module__": "engine.interop.lightning.callbacks"}
    return new_class(name, (base, of), {}, lambda space: space.update(content))


_EMA = "device use_buffers decay update_every_n_steps update_starting_at_step update_starting_at_epoch"
_SWA = "swa_lrs swa_epoch_start annealing_epochs annealing_strategy avg_fn device"
_BACKBONE = "unfreeze_backbone_at_epoch lambda_func backbone_initial_ratio_lr backbone_initial_lr should_align initial_denom_lr train_bn verbose"
_SERVED = "optimization server host port timeout exit_on_failure"
LearningRateMonitor = _named("LearningRateMonitor", own.LearningRateMonitor, "logging_interval log_momentum log_weight_decay")  # fmt: skip
DeviceStatsMonitor = _named("DeviceStatsMonitor", own.DeviceStatsMonitor, "cpu_stats")
WeightAveraging = _named("WeightAveraging", own.WeightAveraging, "device use_buffers")
EMAWeightAveraging = _named("EMAWeightAveraging", own.EMA, _EMA)
StochasticWeightAveraging = _named(
    "StochasticWeightAveraging", own.SWA, _SWA, without={"device": OF_CALLBACKS["leave"]}
)
BasePredictionWriter = _named("BasePredictionWriter", own.BasePredictionWriter, "write_interval")
BaseFinetuning = _named("BaseFinetuning", own.BaseFinetuning)
BackboneFinetuning = _named("BackboneFinetuning", own.BackboneFinetuning, _BACKBONE)
ModelSummary = RichModelSummary = _named("ModelSummary", own.ModelSummary, "max_depth", measure=False)
RichProgressBar = _named("RichProgressBar", own.RichProgressBar, "refresh_rate leave theme console_kwargs", ProgressBar)
TQDMProgressBar = _named("TQDMProgressBar", own.TQDMProgressBar, "refresh_rate process_position leave", ProgressBar)
ServableModule = own.ServableModule
ServableModuleValidator = _named("ServableModuleValidator", own.ServableModuleValidator, _SERVED)
SimpleProfiler = _named("SimpleProfiler", own.SimpleProfiler, "dirpath filename extended")
PyTorchProfiler = _named("PyTorchProfiler", own.Profiler)
Profiler = Callback
__getattr__ = refusing("engine.interop.lightning.callbacks", CLASSES)


class ModelCheckpoint(Checkpoint, own.ModelCheckpoint):
    """Lightning's arguments of :class:`callbacks.ModelCheckpoint`. A checkpoint is complete, in a folder named as Lightning names its file."""

    FILE_EXTENSION = ".ckpt"
    pickles = False
    """With ``ModelCheckpoint.pickles = True`` each checkpoint that is left at a training's end is also a file beside its folder: weights and
    hyperparameters in Lightning's form. The paths then are those of the files, for programs that ``torch.load`` them."""

    def __init__(
        self, dirpath: Any = None, filename: str | None = None, monitor: str | None = None, verbose: bool = False,
        save_last: bool | str | None = None, save_top_k: int = 1, save_on_exception: bool = False,
        save_weights_only: bool = False, mode: Any = "min", auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None, train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None, save_on_train_epoch_end: bool | None = None, enable_version_counter: bool = True,
    ) -> None:  # fmt: skip
        if save_weights_only:
            said = "ModelCheckpoint(save_weights_only=True): checkpoints are complete; 'fit checkpoint export' writes weights only"
            logger.warning(said)
        default = all(each is None for each in (every_n_train_steps, train_time_interval, every_n_epochs))
        epochs = f"{1 if default else every_n_epochs} epochs" if default or every_n_epochs else None
        every: list[Any] = [each for each in (every_n_train_steps, train_time_interval, epochs) if each]
        if len(every) > 1:
            raise ValueError(f"ModelCheckpoint saves every {every[0]} and every {every[1]}: give one of them")
        name = "{epoch}-{step}" if filename is None else filename
        name = _FIELD.sub(r"\1={\1", name) if auto_insert_metric_name else name
        self.idle = not save_top_k and not save_last
        self._names_last, self._trains_last = save_last, save_on_train_epoch_end
        self._files: dict[int, Path] = {}
        kept = (monitor, mode, save_top_k, bool(save_last) or self.idle, None, dirpath, name + self.FILE_EXTENSION)
        # Not asynchronous: a path is there when it is named.
        own.ModelCheckpoint.__init__(self, next(iter(every), None), *kept, asynchronous=False)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.pickles and "://" in str(trainer.run.checkpoint_path("x")):
            said = "files are written beside checkpoints in a local folder: give one as dirpath"
            raise ValueError(f"ModelCheckpoint.pickles = True: {said}")
        own.ModelCheckpoint.setup(self, trainer.run, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._trains_last and self.monitor is not None and trainer.run.val_loaders:
            raise ValueError("ModelCheckpoint(save_on_train_epoch_end=True): with validation, a score is taken after it; leave it out")  # fmt: skip
        own.ModelCheckpoint.on_train_start(self, trainer.run, pl_module)
        self._files = {}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.pickles:
            files = {step: Path(f"{self._path(step)}.pt") for step in self.names}
            if trainer.is_global_zero:
                for step, file in files.items():
                    write_checkpoint(file, self._path(step))
            trainer.strategy.barrier()
            self._files = files

    @property
    def best_k_models(self) -> dict[str, Any]:
        return {path: None if score is None else torch.tensor(score) for path, score in super().best_k_models.items()}

    @property
    def last_model_path(self) -> str:
        return super().last_model_path if self._names_last else ""

    def _path(self, step: int) -> str:
        return str(self._files.get(step) or super()._path(step))


class EarlyStopping(Callback, own.EarlyStopping):
    """Lightning's arguments of :class:`callbacks.EarlyStopping`."""

    def __init__(self, *args: Any, check_on_train_epoch_end: bool | None = None, **kwargs: Any) -> None:
        given = translated(
            "EarlyStopping", "monitor min_delta patience verbose mode strict", args, kwargs, OF_CALLBACKS
        )
        own.EarlyStopping.__init__(self, **{**given, "min_delta": abs(given.get("min_delta", 0.0))})
        self._trains_last = check_on_train_epoch_end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._trains_last and trainer.run.val_loaders:
            said = "with validation it checks after it; leave it out"
            raise ValueError(f"EarlyStopping(check_on_train_epoch_end=True): {said}")
        own.EarlyStopping.on_train_start(self, trainer.run, pl_module)


class GradientAccumulationScheduler(Callback):
    """A schedule ``{first epoch: micro-batches}``, which ``Trainer`` gives to ``Fit(accumulate_grad_batches=...)``."""

    def __init__(self, scheduling: dict[int, int]) -> None:
        self.scheduling = dict(scheduling)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.run.settings.accumulate_grad_batches != self.scheduling:
            raise ValueError(f"GradientAccumulationScheduler: give Fit(accumulate_grad_batches={self.scheduling})")


class LambdaCallback(Callback):
    """Functions as a callback: ``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``."""

    def __init__(self, **functions: Any) -> None:
        for event, function in functions.items():
            if event not in EVENTS:
                raise TypeError(f"LambdaCallback: {event!r} is not an event; events: {', '.join(EVENTS)}")
            if function is not None:
                listens(self, event, function)
