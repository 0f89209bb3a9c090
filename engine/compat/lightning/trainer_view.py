"""``self.trainer`` in modules, data modules and callbacks: the run under the names of Lightning's ``Trainer``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

import torch

import engine.callbacks as own
from engine.compat.lightning.arguments import TRAINER
from engine.compat.lightning.before_run import BeforeRun
from engine.compat.lightning.callback_log import let_log
from engine.compat.lightning.events import RunningStage, TrainerFn, TrainerStatus, original
from engine.compat.lightning.logged_values import Values, latest_shown, latest_values, names_withheld
from engine.compat.lightning.loop_view import EvaluationLoopView, FitLoopView
from engine.compat.lightning.names import OF_RUN, VIEW
from engine.compat.lightning.rank_loaders import loaders_as_given
from engine.compat.lightning.trainer_parts import (
    AcceleratorConnector,
    ProfilerView,
    RunCallbacks,
    StrategyView,
    TrainerState,
)
from engine.config.duration import NEVER
from engine.loop.run import Run
from engine.loop.state import status_of
from engine.utils.extensions import attribute_error


class TrainerView:
    """A run with the attributes of Lightning's ``Trainer``: ``run.trainer``, and ``self.trainer`` of a module or data module.

    Read-only, except for ``should_stop = True``, :meth:`save_checkpoint`, :meth:`print`, and attributes of your own. As in Lightning, a missing limit
    is ``-1`` and an unknown length is infinite. A step that does not read the view pays nothing for it.
    """

    _run: Run | BeforeRun

    def __init__(self, run: Run | BeforeRun) -> None:
        object.__setattr__(self, "_run", run)
        if isinstance(run, Run):
            let_log(run.callbacks, run.module)

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(
            type(self), name
        ):  # a property raised an AttributeError, before the first run for example: raise that error again
            object.__getattribute__(self, name)
        raise attribute_error(self, name, VIEW.get(name, OF_RUN))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in VIEW:
            raise AttributeError(f"trainer.{name} cannot be set, because nothing would read it: {VIEW[name]}")
        attribute = getattr(type(self), name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            where = f"give Trainer({name}=...)" if name in TRAINER else "it follows from the run"
            raise AttributeError(f"trainer.{name} cannot be set: {where}")
        super().__setattr__(name, value)

    run = property(lambda self: self._run, doc="The :class:`engine.Run`.")

    @property
    def _training(self) -> Run | BeforeRun:
        """The current or latest training, even if evaluations have run since."""
        return self._run

    # -- counters and limits ----------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The current epoch, counted from 0; after the training, the number of epochs that were started."""
        return int(self._run.epoch)

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far."""
        return int(self._run.step)

    @property
    def max_epochs(self) -> int | None:
        """The maximum number of epochs; -1 if unlimited, ``None`` in a ``Trainer`` that was given none and has not trained."""
        return -1 if self._run.max_epochs is None else int(self._run.max_epochs)

    @property
    def max_steps(self) -> int:
        """The maximum number of optimizer steps; -1 if unlimited."""
        if self.fast_dev_run:
            return int(self.fast_dev_run)
        steps = self._run.max_steps
        return -1 if steps is None or steps >= NEVER else int(steps)

    def set_limit(self, name: str, value: int | None) -> None:
        """Set ``"max_epochs"`` or ``"max_steps"`` of the training to ``value``; ``None`` removes the limit. All ranks must call this."""
        self._run.set_limit(name, value)

    @property
    def min_epochs(self) -> int | None:
        """``Fit``'s setting ``min_epochs``."""
        epochs: int | None = self._run.settings.min_epochs
        return epochs

    @property
    def min_steps(self) -> int | None:
        """``Fit``'s setting ``min_steps``."""
        steps: int | None = self._run.settings.min_steps
        return steps

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The exact number of optimizer steps in the whole training, for schedules such as OneCycleLR; known from ``setup`` on. Infinite if only
        ``max_time`` ends the training.

        Raises:
            ValueError: the training loader has no length, and there is no ``max_steps``.
        """
        control, loaders = self._run.control, self._run.loaders
        if self._run.stage in ("fit", "sanity"):
            # In manual optimization Lightning gives the smaller one of the batches and max_steps, however many steps a batch has.
            steps = loaders.told_steps(control.max_epochs, control.max_steps, control.max_length)
            if steps is not None:
                return int(steps)
        if self._run.max_epochs is None:
            return math.inf
        raise ValueError(
            "estimated_stepping_batches: the training loader has no length, so the number of steps is unknown: give Fit(max_steps=...)"
        )

    @property
    def num_training_batches(self) -> int | float:
        """The number of micro-batches per epoch on this rank, within the limits; infinite if unknown."""
        return _length(self._training.num_train_batches, self.limit_train_batches)

    @property
    def num_val_batches(self) -> list[int | float]:
        """This rank's micro-batches in each validation loader, within the limits; infinite if unknown."""
        return self._lengths("fit", "sanity", "validate")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """This rank's micro-batches in the sanity check before the training, for each validation loader."""
        limit = self._run.settings.num_sanity_val_steps
        return [length if limit < 0 else min(length, limit) for length in self._lengths("fit", "sanity")]

    @property
    def num_test_batches(self) -> list[int | float]:
        """This rank's micro-batches in each test loader."""
        return self._lengths("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """The number of micro-batches that this rank gets from each prediction loader."""
        return self._lengths("predict")

    def _lengths(self, *stages: str) -> list[int | float]:
        if self._run.stage not in stages:
            return []
        stage = "val" if stages[-1] in ("sanity", "validate") else stages[-1]
        limit = getattr(self, f"limit_{stage}_batches")
        return [_length(batches, limit) for batches in self._run.num_eval_batches]

    @property
    def is_last_batch(self) -> bool:
        """Whether the training's current or latest micro-batch is the last one of its epoch.

        Raises:
            ValueError: the training loader has no length.
        """
        loader = self._training.train_loader
        if loader is None:
            return self._training.state.epoch_done
        if loader.length is None:
            raise ValueError(
                f"is_last_batch: {type(loader.loader).__name__} has no length; do what is due at an epoch's end in on_train_epoch_end"
            )
        return bool(loader.batches_given >= loader.length)

    # -- settings ---------------------------------------------------------------------------------------------------------------

    limit_train_batches = property(lambda self: _limit(self, "limit_train_batches"), doc="``Fit``'s setting; 1.0: all.")
    limit_val_batches = property(lambda self: _limit(self, "limit_val_batches"), doc="``Fit``'s setting; 1.0: all.")
    limit_test_batches = property(lambda self: _limit(self, "limit_test_batches"), doc="``Fit``'s setting; 1.0: all.")
    limit_predict_batches = property(
        lambda self: _limit(self, "limit_predict_batches"), doc="``Fit``'s setting; 1.0: all."
    )
    overfit_batches = property(lambda self: self._run.settings.overfit_batches, doc="``Fit``'s setting.")

    @property
    def fast_dev_run(self) -> int | bool:
        """The setting ``fast_dev_run`` of ``Fit``; ``True`` for one batch."""
        batches: int | bool = self._run.settings.fast_dev_run
        return True if batches == 1 else batches

    log_every_n_steps = property(lambda self: self._run.settings.log_every_n_steps, doc="``Fit``'s setting.")

    @property
    def num_sanity_val_steps(self) -> int | float:
        """The setting ``num_sanity_val_steps`` of ``Fit``; infinite for all batches."""
        steps: int = self._run.settings.num_sanity_val_steps
        return math.inf if steps < 0 else steps

    gradient_clip_val = property(lambda self: self._run.settings.gradient_clip_val, doc="``Fit``'s setting.")
    gradient_clip_algorithm = property(
        lambda self: self._run.settings.gradient_clip_algorithm, doc="``Fit``'s setting."
    )

    @property
    def _batch_validation(self) -> own.BatchValidation | None:
        """The callback that takes the place of ``Fit``'s ``val_every``, if there is one."""
        if self._run.settings.fast_dev_run:
            return None
        return next((callback for callback in self._run.callbacks if isinstance(callback, own.BatchValidation)), None)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """The number of epochs between validations; 1 if there are several per epoch, ``None`` if the interval is not in epochs."""
        if (in_batches := self._batch_validation) is not None:
            return in_batches.epochs
        every = self._run.settings.val_every
        return max(1, int(every.value)) if every is not None and every.unit == "epochs" else None

    @property
    def val_check_interval(self) -> int | float:
        """The interval between validations: a fraction of an epoch (float), or a number of micro-batches (int).

        Raises:
            ValueError: the interval is in seconds, or there is no validation.
        """
        if (in_batches := self._batch_validation) is not None:
            return in_batches.interval
        every = self._run.settings.val_every
        if every is None or every.unit == "seconds":
            raise ValueError(
                f"val_check_interval is a number of batches, but this run has val_every={every}: read Fit's val_every"
            )
        if every.unit == "epochs":
            return min(1.0, float(every.value))
        return int(every.value) * self.accumulate_grad_batches

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of micro-batches per optimizer step in this epoch."""
        return int(self._run.window_at(self._run.state.epoch))

    @property
    def precision(self) -> str:
        """The precision's name, such as ``"bf16-mixed"``."""
        return str(self._run.engine.precision.name)

    # -- values -----------------------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> Values:
        """The latest value of every logged name, as tensors of shape () on the device. A value ``x`` that is logged ``on_step`` and ``on_epoch`` has
        the names ``x``, ``x_step`` and ``x_epoch``.

        Within a training step, values are this rank's for the step so far, without communication. In ``on_validation_epoch_end``, and once an epoch
        is over, they are over all ranks. In ``on_train_epoch_end`` reading them is a collective: all ranks must do it.
        """
        values = latest_values(self._run)
        return Values({name: _tensor(value, self._run.device) for name, value in values.items()})

    @property
    def logged_metrics(self) -> Values:
        """:attr:`callback_metrics` without ``x`` if there is ``x_step`` or ``x_epoch``, and without values logged with ``logger=False``."""
        metrics = self.callback_metrics
        forked = {name.removesuffix(end) for name in metrics for end in ("_step", "_epoch") if name.endswith(end)}
        hidden = forked | names_withheld(self._run)
        return Values({name: value for name, value in metrics.items() if name not in hidden})

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar=True``, as floats; waits for the device."""
        return {name: float(value) for name, value in latest_shown(self._run).items()}

    # -- stopping ---------------------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked the training to stop early. Setting it to True asks for that, as ``run.stop()`` does."""
        training = self._training
        has_request = training.stop_request is not None or bool(training.waiting_stops)
        return has_request or status_of(training.stop_reason) == "stopped"

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._run.stop("trainer.should_stop was set")
        elif self.should_stop:
            raise ValueError("trainer.should_stop = False: the training was asked to end, which cannot be taken back")

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or an error has reached this rank."""
        return self._run.interrupted or self._run.exception is not None

    @property
    def received_sigterm(self) -> bool:
        """Whether any rank has received SIGTERM."""
        return bool(self._run.terminated)

    # -- current stage ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """The method that is running and its stage, with Lightning's enums."""
        fn = "fit" if self._run.stage == "sanity" else str(self._run.stage)
        return TrainerState(
            TrainerStatus.INTERRUPTED if self.interrupted else TrainerStatus.RUNNING,
            TrainerFn(fn) if fn else None,
            RunningStage(self._stage) if self._stage else None,
        )

    @property
    def _stage(self) -> str:
        """Lightning's ``TrainerState.stage`` as text, such as ``"train"`` or ``"sanity_check"``."""
        stage = str(self._run.stage)
        if stage == "fit":
            return "validate" if self._run.evaluating else "train"
        return "sanity_check" if stage == "sanity" else stage

    training = property(
        lambda self: self._stage == "train", doc="Whether a training is running, outside of its validations."
    )
    validating = property(
        lambda self: self._stage == "validate", doc="Whether a validation is running, in a training or alone."
    )
    testing = property(lambda self: self._stage == "test", doc="Whether a test is running.")
    predicting = property(lambda self: self._stage == "predict", doc="Whether a prediction is running.")
    sanity_checking = property(
        lambda self: self._stage == "sanity_check", doc="Whether the sanity check before the training is running."
    )
    evaluating = property(
        lambda self: self._stage in ("validate", "test", "sanity_check"),
        doc="Whether a validation, a test or the sanity check is running.",
    )

    fit_loop = property(lambda self: FitLoopView(self), doc="The parts of Lightning's loops that modules read.")
    validate_loop = property(lambda self: EvaluationLoopView(self, "validate"), doc="The validation's loop.")
    test_loop = property(lambda self: EvaluationLoopView(self, "test"), doc="The test's loop.")
    predict_loop = property(lambda self: EvaluationLoopView(self, "predict"), doc="The prediction's loop.")

    @property
    def profiler(self) -> Any:
        """Names parts of the code for torch's profiler."""
        return vars(self).setdefault("_profiler", ProfilerView())

    # -- objects ----------------------------------------------------------------------------------------------------------------

    model = property(lambda self: original(self._run.module), doc="The module.")
    lightning_module = property(lambda self: original(self._run.module), doc="The module.")
    datamodule = property(lambda self: original(self._run.datamodule), doc="The data module, or ``None``.")
    optimizers = property(lambda self: list(self._run.optimizers), doc="The optimizers.")
    lr_scheduler_configs = property(
        lambda self: list(self._run.schedulers), doc="Schedulers with ``scheduler``, ``interval``, ``monitor``, ..."
    )
    train_dataloader = property(
        lambda self: loaders_as_given(self._run, "train"), doc="The training loaders; see :func:`loaders_as_given`."
    )
    val_dataloaders = property(
        lambda self: loaders_as_given(self._run, "validation"),
        doc="The validation loaders; see :func:`loaders_as_given`.",
    )
    test_dataloaders = property(
        lambda self: loaders_as_given(self._run, "test"), doc="The test loaders; see :func:`loaders_as_given`."
    )
    predict_dataloaders = property(
        lambda self: loaders_as_given(self._run, "predict"), doc="The prediction loaders; see :func:`loaders_as_given`."
    )
    callbacks = property(
        lambda self: RunCallbacks(original(callback) for callback in self._run.callbacks),
        doc="The run's callbacks, in their order.",
    )
    loggers = property(lambda self: self._run.loggers, doc="The loggers among the callbacks.")
    logger = property(
        lambda self: next(iter(self._run.loggers), None), doc="The first of :attr:`loggers`, or ``None``."
    )

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints."""
        return [original(callback) for callback in self._run.callbacks if callback.is_checkpoint]

    @property
    def checkpoint_callback(self) -> Any:
        """The first of :attr:`checkpoint_callbacks`, or ``None``."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop the training early."""
        return [original(callback) for callback in self._run.callbacks if callback.is_early_stopping]

    @property
    def early_stopping_callback(self) -> Any:
        """The first of :attr:`early_stopping_callbacks`, or ``None``."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The first callback that shows the progress, or ``None``."""
        return next((original(callback) for callback in self._run.callbacks if callback.shows_progress), None)

    # -- ranks ------------------------------------------------------------------------------------------------------------------

    strategy = property(
        lambda self: StrategyView(self._run),
        doc="A view of the strategy with ``root_device``, ``barrier`` and ``broadcast``.",
    )
    is_global_zero = property(lambda self: self._run.is_main_process, doc="Whether this is rank 0.")
    global_rank = property(lambda self: self._run.rank, doc="The rank of this process in the job.")
    local_rank = property(lambda self: self._run.local_rank, doc="The rank of this process on its machine.")
    world_size = property(lambda self: self._run.world_size, doc="The number of processes in the job.")
    node_rank = property(lambda self: self._run.rank // self.num_devices, doc="The rank of this machine in the job.")
    device_ids = property(
        lambda self: _device_ids(self._run), doc="The indices of the devices that this machine's processes use."
    )
    num_nodes = property(
        lambda self: self._run.engine.group.environment.num_nodes, doc="The number of machines in the job."
    )
    num_devices = property(
        lambda self: self._run.engine.group.environment.local_world_size, doc="The number of processes on this machine."
    )

    @property
    def _accelerator_connector(self) -> AcceleratorConnector:
        settings = self._run.settings
        return AcceleratorConnector(settings.accelerator, settings.devices)

    # -- files ------------------------------------------------------------------------------------------------------------------

    default_root_dir = property(lambda self: str(self._run.settings.root_dir), doc="``Fit``'s ``root_dir``.")

    @property
    def log_dir(self) -> str:
        """The folder of the first logger that has one, or of the run."""
        folder = getattr(self.logger, "log_dir", None)
        return str(self._run.folder) if folder is None else str(folder)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run resumed from or loaded its weights from."""
        return None if self._run.loaded_from is None else str(self._run.loaded_from)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None) -> Path | str:
        """Save a checkpoint with everything that resuming needs, as a folder named ``filepath``; all ranks must call this.

        Args:
            filepath: a path or a URL; a bare name is relative to the run's checkpoint folder.
            weights_only: must not be true: checkpoints are complete, and :class:`engine.Resume` can load only the weights of one.

        Returns:
            The path or URL of the checkpoint.

        Raises:
            ValueError: ``weights_only=True``.
        """
        if weights_only:
            raise ValueError(
                "save_checkpoint(weights_only=True): checkpoints are complete; engine.Resume(path, weights_only=True) takes the weights alone, and "
                "'fit checkpoint export' writes them"
            )
        path: Path | str = self._run.save_checkpoint_at(filepath)
        return path

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)


def _length(number: int | None, limit: int | float) -> int | float:
    """The number of micro-batches in a loader; if unknown, the ``limit`` if that is a number of batches, else infinite."""
    if number is not None:
        return number
    return limit if isinstance(limit, int) else math.inf


def _device_ids(run: Run | BeforeRun) -> list[int]:
    devices = run.settings.devices
    return list(devices if isinstance(devices, tuple) else range(run.engine.group.environment.local_world_size))


def _limit(view: TrainerView, name: str) -> int | float:
    value = getattr(view._run.settings, name)
    return 1.0 if value is None else value


def _tensor(value: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.get_default_dtype(), device=device).reshape(())
