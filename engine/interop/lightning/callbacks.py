"""Lightning's callbacks: this library's under its names and arguments. An argument without a counterpart is an error."""

from __future__ import annotations

import re
from datetime import timedelta
from types import new_class
from typing import Any

import torch

import engine.callbacks as own
from engine.config.duration import parse
from engine.interop.lightning.callback import EVENTS, Callback, listens
from engine.interop.lightning.refused import ANY, refused_class, translated
from engine.utils.log import logger

_FIELD = re.compile(r"\{([^}:!\[]+)")
_TALK = (ANY, "")


class Checkpoint(Callback):
    """The base of callbacks that save checkpoints."""


class ProgressBar(Callback):
    """The base of progress bars."""


def _named(
    name: str,
    of: type[Any],
    order: str = "",
    without: Any = None,
    renamed: Any = None,
    base: type = Callback,
    **fixed: Any,
) -> Any:
    """``of`` under Lightning's ``name``, with its positional arguments in Lightning's ``order``.

    Args:
        without: as :func:`engine.interop.lightning.refused.translated`.
        renamed: our name of an argument, by Lightning's.
        fixed: our arguments that Lightning does not have.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = translated(name, order, args, kwargs, without or {})
        of.__init__(self, **{(renamed or {}).get(key, key): value for key, value in given.items()}, **fixed)
        self.idle = base is ProgressBar and kwargs.get("refresh_rate", [*args, 1][0]) == 0

    content = {
        "__init__": init,
        "__doc__": f"Lightning's arguments of :class:`callbacks.{name}`.",
        "__module__": __name__,
    }
    return new_class(name, (base, of), {}, lambda space: space.update(content))


_DEVICE = {"device": (None, "averages are on the device of the weights")}
_LOTTERY = (False, "weights are not put back to their first values: give use_lottery_ticket_hypothesis=False")
_THEME = (None, "give callbacks.RichProgressBar(console=...)")
_BEFORE = "call callbacks.{} before the training, and set what it finds"
LearningRateMonitor = _named(
    "LearningRateMonitor", own.LearningRateMonitor, "logging_interval log_momentum log_weight_decay"
)
DeviceStatsMonitor = _named("DeviceStatsMonitor", own.DeviceStatsMonitor, "cpu_stats")
WeightAveraging = _named("WeightAveraging", own.WeightAveraging, "device use_buffers", _DEVICE)
EMAWeightAveraging = _named(
    "EMAWeightAveraging",
    own.EMA,
    "device use_buffers decay update_every_n_steps update_starting_at_step update_starting_at_epoch",
    _DEVICE,
)
StochasticWeightAveraging = _named(
    "StochasticWeightAveraging",
    own.SWA,
    "swa_lrs swa_epoch_start annealing_epochs annealing_strategy avg_fn device",
    {"device": _TALK},
)
BaseFinetuning = _named("BaseFinetuning", own.BaseFinetuning)
BackboneFinetuning = _named(
    "BackboneFinetuning",
    own.BackboneFinetuning,
    "unfreeze_backbone_at_epoch lambda_func backbone_initial_ratio_lr backbone_initial_lr should_align initial_denom_lr train_bn",
    {"initial_denom_lr": (10.0, "give backbone_initial_ratio_lr"), "verbose": _TALK, "rounding": _TALK},
)
ModelPruning = _named(
    "ModelPruning",
    own.Pruning,
    "pruning_fn parameters_to_prune parameter_names use_global_unstructured amount apply_pruning make_pruning_permanent",
    {
        "use_lottery_ticket_hypothesis": _LOTTERY,
        "resample_parameters": _LOTTERY,
        "prune_on_train_epoch_end": (True, "pruning is between two epochs"),
        "verbose": _TALK,
    },
    {"make_pruning_permanent": "make_permanent"},
)
ModelSummary = RichModelSummary = _named("ModelSummary", own.ModelSummary, "max_depth", measure=False)
RichProgressBar = _named(
    "RichProgressBar",
    own.RichProgressBar,
    "refresh_rate leave theme console_kwargs",
    {"refresh_rate": _TALK, "leave": _TALK, "theme": _THEME, "console_kwargs": _THEME},  # it is drawn by time
    base=ProgressBar,
)
TQDMProgressBar = _named(
    "TQDMProgressBar",
    own.TQDMProgressBar,
    "refresh_rate process_position leave",
    {"refresh_rate": _TALK, "process_position": _TALK, "leave": _TALK},
    base=ProgressBar,
)
SimpleProfiler = _named("SimpleProfiler", own.SimpleProfiler, "dirpath filename extended")
PyTorchProfiler = _named("PyTorchProfiler", own.Profiler)
Profiler = Callback
AdvancedProfiler = refused_class("AdvancedProfiler", "use SimpleProfiler, PyTorchProfiler, or python -m cProfile")
BatchSizeFinder = refused_class("BatchSizeFinder", _BEFORE.format("find_batch_size(module, loader)"))
LearningRateFinder = refused_class("LearningRateFinder", _BEFORE.format("find_lr(module, loader)"))
OnExceptionCheckpoint = refused_class(
    "OnExceptionCheckpoint", "ModelCheckpoint saves the last complete step after an error"
)
SpikeDetection = refused_class("SpikeDetection", "use callbacks.SpikeGuard()")
ThroughputMonitor = refused_class("ThroughputMonitor", "use callbacks.ThroughputMonitor()")


class ModelCheckpoint(Checkpoint, own.ModelCheckpoint):
    """Lightning's arguments of :class:`callbacks.ModelCheckpoint`. A checkpoint is complete, in a folder named as Lightning names its file."""

    FILE_EXTENSION = ".ckpt"

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
        mode: Any = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        if save_weights_only:
            logger.warning(
                "ModelCheckpoint(save_weights_only=True): checkpoints are complete; 'fit checkpoint export' writes weights only"
            )
        default = every_n_train_steps is train_time_interval is every_n_epochs is None
        when = [every_n_train_steps, train_time_interval, "1 epochs" if default else None]
        every: list[Any] = [each for each in when if each] + ([f"{every_n_epochs} epochs"] if every_n_epochs else [])
        if len(every) > 1:
            raise ValueError(f"ModelCheckpoint saves every {every[0]} and every {every[1]}: give one of them")
        name = "{epoch}-{step}" if filename is None else filename
        name = _FIELD.sub(r"\1={\1", name) if auto_insert_metric_name else name
        self.idle = not save_top_k and not save_last
        self._names_last, self._trains_last, self._run = save_last, save_on_train_epoch_end, None
        own.ModelCheckpoint.__init__(
            self,
            *(next(iter(every), None), monitor, mode, save_top_k, bool(save_last) or self.idle, None, dirpath),
            filename=name + self.FILE_EXTENSION,
            asynchronous=False,  # the file that a name promises is there
        )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._run = trainer.run
        own.ModelCheckpoint.setup(self, trainer.run, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._trains_last and self.monitor is not None and trainer.run.val_loaders:
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}, save_on_train_epoch_end=True): with validation, a score is taken after it; leave "
                "the second out"
            )
        own.ModelCheckpoint.on_train_start(self, trainer.run, pl_module)

    @property
    def best_k_models(self) -> dict[str, Any]:
        """The checkpoints that are kept, best first, and their scores; those without a score only if nothing is monitored."""
        kept = [step for step in self._ranked(self.scores) if self.monitor is None or self.scores[step] is not None]
        return {self._path(step): None if self.monitor is None else torch.tensor(self.scores[step]) for step in kept}

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without ``monitor`` the newest. Empty if there is none."""
        return next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The value of ``monitor`` of the best."""
        return self.best_k_models.get(self.best_model_path)

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, with ``save_last``."""
        return self._path(max(self.names)) if self.names and self._names_last else ""

    def _path(self, step: int) -> str:
        return "" if self._run is None else str(self._run.checkpoint_path(self.names[step]))


class EarlyStopping(Callback, own.EarlyStopping):
    """Lightning's arguments of :class:`callbacks.EarlyStopping`."""

    def __init__(
        self, *args: Any, strict: bool = True, check_on_train_epoch_end: bool | None = None, **kwargs: Any
    ) -> None:
        order = "monitor min_delta patience verbose mode"
        given = translated("EarlyStopping", order, args, kwargs, {"verbose": _TALK, "log_rank_zero_only": _TALK})
        own.EarlyStopping.__init__(self, **{**given, "min_delta": abs(given.get("min_delta", 0.0))})
        self.strict, self._trains_last = strict, check_on_train_epoch_end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._trains_last and trainer.run.val_loaders:
            raise ValueError(
                "EarlyStopping(check_on_train_epoch_end=True): with validation it checks after it; leave it out"
            )
        own.EarlyStopping.on_train_start(self, trainer.run, pl_module)

    def _check(self, run: Any) -> None:
        if self.strict or self.monitor in run.metrics:
            super()._check(run)


class GradientAccumulationScheduler(Callback):
    """A schedule ``{first epoch: micro-batches}``, which ``Trainer`` gives to ``Fit(accumulate_grad_batches=...)``."""

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
        self._seconds, self._run = None if found is None else found.value, None
        listens(self, "on_train_batch_end" if interval == "step" else "on_train_epoch_end", self._check)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._run = trainer.run

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds of training so far."""
        return 0.0 if self._run is None else self._run.elapsed_s

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left; ``None`` without a ``duration``."""
        return None if self._seconds is None else self._seconds - self.time_elapsed()

    def _check(self, trainer: Any, *event: Any) -> None:
        if self._seconds is not None and self.time_elapsed() >= self._seconds:
            trainer.run.stop(f"Timer: {self._seconds:g} s are over")


class LambdaCallback(Callback):
    """Functions as a callback: ``LambdaCallback(on_train_start=lambda trainer, pl_module: ...)``."""

    def __init__(self, **functions: Any) -> None:
        for event, function in functions.items():
            if event not in EVENTS:
                raise TypeError(f"LambdaCallback: {event!r} is not an event; events: {', '.join(EVENTS)}")
            if function is not None:
                listens(self, event, function)


class BasePredictionWriter(Callback):
    """Define ``write_on_batch_end(trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx)`` or
    ``write_on_epoch_end(trainer, pl_module, predictions, batch_indices)``. ``batch_indices`` is ``None``: batches are dealt to the ranks in
    turn, so that batch ``i`` of a rank is number ``i * world_size + rank`` in the data's order."""

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in ("batch", "epoch", "batch_and_epoch"):
            raise ValueError(f"write_interval={write_interval!r}: it must be 'batch', 'epoch' or 'batch_and_epoch'")
        self.interval = write_interval
        self._kept: list[list[Any]] = []

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._kept = [[] for _ in trainer.run.num_eval_batches]

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if "batch" in self.interval:
            self.write_on_batch_end(trainer, pl_module, outputs, None, batch, batch_idx, dataloader_idx)  # type: ignore[attr-defined]
        if "epoch" in self.interval:
            self._kept[dataloader_idx].append(outputs)

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if "epoch" in self.interval:
            found = self._kept[0] if len(self._kept) == 1 else self._kept
            self.write_on_epoch_end(trainer, pl_module, found, None)  # type: ignore[attr-defined]
