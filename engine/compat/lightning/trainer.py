"""``Trainer``: :class:`engine.Fit` with Lightning's arguments, methods and attributes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from engine.callback import Callback
from engine.compat.checked_arguments import checking_arguments
from engine.compat.lightning import pickled_checkpoint
from engine.compat.lightning.adapters import adapt
from engine.compat.lightning.before_run import BeforeRun
from engine.compat.lightning.callback import Callback as NamedCallback
from engine.compat.lightning.callback_log import let_log
from engine.compat.lightning.callbacks import ModelCheckpoint
from engine.compat.lightning.default_dtype import default_dtype
from engine.compat.lightning.environment_defaults import with_environment_defaults
from engine.compat.lightning.events import TrainerStatus, original
from engine.compat.lightning.file_loggers import FileLogger
from engine.compat.lightning.loggers import Logger, WrappedLogger
from engine.compat.lightning.module import LightningModule
from engine.compat.lightning.searches import Finder
from engine.compat.lightning.shared_hyperparameters import check_shared
from engine.compat.lightning.trainer_objects import TrainerObjects
from engine.compat.lightning.trainer_parts import AcceleratorConnector as _AcceleratorConnector  # noqa: F401  # packages import it from there
from engine.compat.lightning.trainer_parts import RunCallbacks
from engine.compat.lightning.trainer_translation import checked_loggers, is_of, run_root, translate
from engine.compat.lightning.trainer_view import TrainerView, Values
from engine.compat.lightning.utilities import tell_lightning_utilities
from engine.compat.refusals import refuse_stand_ins
from engine.config.settings import checked_setting
from engine.fit import Fit
from engine.loop.run import Run
from engine.loop.state import Result
from engine.step.precision import Precision
from engine.utils.extensions import hint
from engine.utils.log import logger
from engine.utils.paths import expanded
from engine.utils.text import terminal_text


class Trainer(TrainerView):
    """Trains as Lightning's ``Trainer`` does. Each argument is translated for :class:`engine.Fit`, or raises an error that says what to use.

    The attributes are in :class:`engine.compat.lightning.trainer_view.TrainerView`; they describe the current run, or the latest one.
    """

    result: Result | None = None
    """The result of the latest training."""

    # fmt: off
    @with_environment_defaults
    @checking_arguments(but=("callbacks", "logger"))  # objects of other classes are adapted
    def __init__(
        self, *, accelerator: str = "auto", strategy: Any = "auto", devices: list[int] | str | int = "auto", num_nodes: int = 1,
        precision: str | int | None = None, logger: Logger | list[Logger] | bool | None = None,
        callbacks: list[NamedCallback | Callback] | NamedCallback | Callback | None = None, fast_dev_run: int | bool = False,
        max_epochs: int | None = None, min_epochs: int | None = None, max_steps: int = -1, min_steps: int | None = None,
        max_time: str | timedelta | dict[str, float] | None = None, limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None, limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None, overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, float] | None = None,
        check_val_every_n_epoch: int | None = 1, num_sanity_val_steps: int | bool | None = None, log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None, enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None, accumulate_grad_batches: int = 1, gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None, deterministic: bool | str | None = None, benchmark: bool | None = None,
        inference_mode: bool = True, use_distributed_sampler: bool = True, profiler: Callback | str | None = None, detect_anomaly: bool = False,
        barebones: bool = False, plugins: Any = None, sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0, default_root_dir: str | os.PathLike[str] | None = None,
        enable_autolog_hparams: bool = True, model_registry: str | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        # fmt: on
        if isinstance(num_sanity_val_steps, bool):
            arguments["num_sanity_val_steps"] = int(num_sanity_val_steps)  # scripts write False for 0
        translation = translate(arguments)
        self._arguments, self._objects = arguments, TrainerObjects(translation)
        self._fit = Fit(**translation.settings, callbacks=self._objects.passed())
        self._module: Any = None
        self._trained: Run | BeforeRun | None = None
        self._datamodule: Any = None
        super().__init__(BeforeRun(self._fit.settings))

    def __getattr__(self, name: str) -> Any:
        arguments = self.__dict__.get("_arguments", {})
        return arguments[name] if name in arguments else super().__getattr__(name)

    # -- runs ---------------------------------------------------------------------------------------------------------------------

    def fit(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> None:  # fmt: skip
        """Train ``model``. ``ckpt_path``: the checkpoint to resume from; ``"last"``: the newest one, if there is any."""
        model, loaders, datamodule = self._adapt_objects(model, train_dataloaders, datamodule)
        finders = [callback for callback in self.callbacks if isinstance(callback, Finder)]
        if finders:
            if ckpt_path is not None:
                raise ValueError(f"{type(finders[0]).__name__} searches before a new training: leave it out, or ckpt_path")
            self.search_with(finders, model, loaders, datamodule)
            model, loaders, datamodule = self._adapt_objects(model, loaders, datamodule)
        pickled_checkpoint.check_complete(ckpt_path)
        self._prepare_settings(trains=True, resumes=ckpt_path == "last")
        resume_from = "auto" if ckpt_path == "last" else ckpt_path
        with pickled_checkpoint.readable(resume_from, self._arguments["plugins"]) as resume, self._default_dtype(model):
            self.result = self._fit.run(model, loaders, val_dataloaders, datamodule=datamodule, resume=resume)

    def search_with(self, finders: Sequence[Finder], model: Any, loaders: Any, datamodule: Any) -> None:
        """Let ``finders`` search for a learning rate or a batch size before a training with these objects."""
        model, loaders, datamodule = self._adapt_objects(model, loaders, datamodule)
        for finder in finders:
            finder.search(self._fit, model, loaders, datamodule)

    def validate(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True, datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Validate and return a dict of metrics per loader. Without ``model``, use the latest one, with its best checkpoint if there is one."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, datamodule, verbose)

    def test(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True, datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        return self._evaluate("test", model, dataloaders, ckpt_path, datamodule, verbose)

    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """Return all ranks' outputs of ``predict_step`` in the order of the data; one list per loader if there are several."""
        keep = return_predictions is not False
        predictions = self._evaluate("predict", model, dataloaders, ckpt_path, datamodule, False, return_predictions=keep)
        return predictions if keep else None

    def _evaluate(
        self, verb: str, model: Any, loaders: Any, ckpt_path: Any, datamodule: Any, verbose: bool, **options: Any
    ) -> Any:
        """Call ``Fit``'s method ``verb`` with the arguments translated, print its metrics if asked to, and return its results."""
        if model is None:
            if self._module is None:
                raise TypeError(f"{verb}() needs a model: this trainer has not trained one")
            model, best = self._module, getattr(self.checkpoint_callback, "best_model_path", None)
            ckpt_path = ckpt_path or best or None
        if ckpt_path == "best":
            ckpt_path = getattr(self.checkpoint_callback, "best_model_path", None) or "best"
        model, loaders, datamodule = self._adapt_objects(model, loaders, datamodule)
        self._prepare_settings(trains=False, resumes=False)
        plugins = self._arguments["plugins"]
        with pickled_checkpoint.readable(ckpt_path, plugins) as checkpoint, self._default_dtype(model):
            results = getattr(self._fit, verb)(model, loaders, datamodule=datamodule, checkpoint=checkpoint, **options)
        bar = self.progress_bar_callback
        if verbose and (bar is None or getattr(bar, "is_disabled", False)):
            for number, metrics in enumerate(results):
                text = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
                self.print(terminal_text(f"{verb} {number}: {text}", one_line=True))
        return results

    def _adapt_objects(self, model: Any, loaders: Any, datamodule: Any) -> tuple[Any, Any, Any]:
        """Adapt the objects of a run and give them this trainer; return model, loaders and data module. A data module may be given as ``loaders``."""
        if datamodule is None and hasattr(loaders, "prepare_data") and hasattr(loaders, "setup"):
            loaders, datamodule = None, loaders
        refuse_stand_ins("Trainer", (model, datamodule))
        model, datamodule = adapt(model), adapt(datamodule)
        if not isinstance(model, LightningModule):
            raise TypeError(f"Trainer takes a LightningModule, got {type(model).__name__}; engine.Fit takes a TrainModule")
        self._module, self._datamodule = model, datamodule
        for part in filter(None, (model, datamodule)):
            part.trainer = self
        return model, loaders, datamodule

    def _default_dtype(self, model: LightningModule) -> AbstractContextManager[None]:
        return default_dtype(model, Precision.parse(self._fit.settings.precision).parameters)

    def _prepare_settings(self, *, trains: bool, resumes: bool) -> None:
        """Give the next run the loggers and callbacks of now, and let it write into the folder of its first logger. ``resumes``: it trains on from
        the newest checkpoint there is."""
        for entry in self.loggers if trains else ():
            if isinstance(entry, FileLogger):
                entry.renew(resumes=resumes)
        root_dir, callbacks = run_root(self.loggers, self.default_root_dir), self._objects.passed()
        self._fit.settings = replace(self._fit.settings, root_dir=root_dir, callbacks=checked_setting("callbacks", callbacks))

    def attach_run(self, run: Run) -> None:
        """Make ``run``, which is starting, the trainer's current run; called by the module."""
        if run.world_size > 1 and not self._arguments["use_distributed_sampler"]:
            argument = "use_distributed_sampler"
            raise ValueError(f"Trainer({argument}=False) has no counterpart on {run.world_size} ranks{hint('setting', argument)}")
        if self.loggers and run.datamodule is not None:
            check_shared(run.module, run.datamodule)
        if run.stage == "fit":
            run.loaders.reload_every = self._arguments["reload_dataloaders_every_n_epochs"]
            self._continue_counters(run)
            self._trained = run
        self._run, run.trainer = run, self
        let_log(run.callbacks, run.module)
        for callback in self.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback not in run.callbacks:
                callback.show_folder(run)
        tell_lightning_utilities(run.rank)
        for entry in self.loggers:
            if isinstance(entry, (WrappedLogger, FileLogger)):
                entry.attach_run(run)

    def _continue_counters(self, run: Run) -> None:
        """Continue the step and epoch counters of the previous training, as Lightning does; a resumed run then restores the checkpoint's."""
        previous = self._trained
        if previous is None:
            return
        run.state.restore({"step": previous.step, "epoch": previous.epoch, "samples": previous.samples})
        if run.max_epochs is not None and previous.epoch >= run.max_epochs and run.is_main_process:
            logger.warning(
                "Trainer.fit: max_epochs=%d was reached by the training before, so nothing is trained; a new Trainer starts again, and "
                "trainer.fit_loop.max_epochs = n continues",
                run.max_epochs,
            )

    def set_limit(self, name: str, value: int | None) -> None:
        limits: dict[str, Any] = {name: value}
        self._arguments[name] = -1 if value is None else value
        self._fit.settings = replace(self._fit.settings, **limits)
        super().set_limit(name, value)

    def save_checkpoint(  # type: ignore[override]
        self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None, *, pickle: bool = False
    ) -> None:
        """Save the current or latest training as one file; all ranks must call this. The file is a zip (:mod:`engine.checkpoint.one_file`), or with
        ``pickle=True`` a pickle of weights, hyperparameters and counters that Lightning can read. ``weights_only``: without the optimizers.
        """
        if self._trained is None:
            raise RuntimeError("save_checkpoint() needs a model: this trainer has not trained one")
        run, path = self._trained, Path(expanded(filepath)).absolute()
        if storage_options is not None or "://" in str(filepath):
            raise ValueError(f"save_checkpoint({filepath!r}): give a local path; ModelCheckpoint(dirpath=...) takes a URL")
        complete_file = path.with_name(f".{path.name}.whole") if pickle else path
        run.engine.settle()
        with run.optimizer_set.modes.evaluating():
            all_content = run.checkpoint_content()
            content = replace(all_content, optimizers={}) if weights_only or pickle else all_content
            run.checkpoints.save_at(complete_file, content, one_file=True)
        if pickle and run.is_main_process:
            pickled_checkpoint.write_checkpoint(path, complete_file)
            complete_file.unlink()
        run.engine.wait_for_everyone()

    def __getstate__(self) -> dict[str, Any]:
        # A run belongs to this process. A copy or a pickle has the settings, the objects, the counters and the values, and can train on.
        run = BeforeRun.instead_of(self._run, self._fit.settings, self.callback_metrics)
        trained = None if self._trained is None else BeforeRun.instead_of(self._trained, self._fit.settings, {})
        return {**vars(self), "_run": run, "_trained": trained}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    # -- attributes that differ from the view's -----------------------------------------------------------------------------------

    @property
    def profiler(self) -> Any:
        """The given profiler if it is an object with ``profile``, else one that names parts of the code for torch's profiler."""
        profiler = self._arguments["profiler"]
        return profiler if hasattr(profiler, "profile") else super().profiler

    device_ids = property(lambda self: [*range(self.num_devices)], doc="One index per process of this machine.")
    model = lightning_module = property(lambda self: original(self._module), doc="The module.")
    datamodule = property(lambda self: original(self._datamodule), doc="The data module, or ``None``.")

    @property
    def callbacks(self) -> list[Any]:
        """The given callbacks and Lightning's default ones, in a run and after it also those of the module. Between runs they may be exchanged, and
        others appended; those of a run are fixed."""
        both = self._objects.callbacks
        if not isinstance(self._run, BeforeRun):
            both = self._objects.with_those_of_module(self._run)
        return RunCallbacks(both) if self._in_run or both is not self._objects.callbacks else both

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Any] | None) -> None:
        self._refuse_in_run("callbacks")
        self._objects.callbacks = [] if callbacks is None else list(callbacks)

    @property
    def loggers(self) -> list[Any]:
        """The given loggers, or Lightning's default one. They may be exchanged between runs."""
        return self._objects.loggers

    @loggers.setter
    def loggers(self, loggers: Sequence[Any] | None) -> None:
        self._refuse_in_run("loggers")
        self._objects.loggers = checked_loggers(loggers or [])

    @property
    def logger(self) -> Any:
        """The first of :attr:`loggers`, or ``None``. Setting it replaces all."""
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    def _refuse_in_run(self, name: str) -> None:
        if self._in_run:
            raise RuntimeError(f"trainer.{name} cannot be set in a run, whose {name} are fixed: set them before it begins")

    @property
    def _in_run(self) -> bool:
        return self._module is not None and bool(self._module.attached)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints, also those that ``fast_dev_run`` leaves out of a run."""
        return [callback for callback in self.callbacks if is_of(callback, "Checkpoint")]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        return [callback for callback in self.callbacks if is_of(callback, "EarlyStopping")]

    @property
    def progress_bar_callback(self) -> Any:
        """The first callback that shows the progress, also if it is switched off, or ``None``."""
        return next((callback for callback in self.callbacks if is_of(callback, "ProgressBar")), None)

    @property
    def max_epochs(self) -> int | None:
        """The maximum number of epochs; -1 if unlimited. Before a training the argument, which may be ``None``."""
        return self._arguments["max_epochs"] if self._trained is None and not self.fast_dev_run else super().max_epochs

    @property
    def min_epochs(self) -> int | None:
        """The argument; without it, before a training ``None``, and then 1 if there is a ``min_steps``, else 0."""
        epochs: int | None = self._arguments["min_epochs"]
        return epochs if epochs is not None or self._trained is None else int(self.min_steps is not None)

    @property
    def default_root_dir(self) -> str:
        """The argument of this name, with the home directory for ``~``; by default the current folder."""
        root = self._arguments["default_root_dir"]
        if root is None:
            return os.getcwd()
        return str(root) if "://" in str(root) else os.path.normpath(expanded(root))

    @property
    def log_dir(self) -> str:
        """The folder of the first logger, or else of the run; before a run ``default_root_dir``."""
        if not isinstance(self._run, BeforeRun):
            return super().log_dir
        folder = getattr(self.logger, "log_dir", None) or getattr(self.logger, "save_dir", None)
        return self.default_root_dir if folder is None else str(folder)

    @property
    def _training(self) -> Run | BeforeRun:
        return self._trained or self._run

    @property
    def callback_metrics(self) -> Values:
        if isinstance(self._run, BeforeRun):
            return Values({name: torch.tensor(value) for name, value in self._run.values.items()})
        return super().callback_metrics

    @property
    def _stage(self) -> str:
        return super()._stage if self._in_run else ""

    @property
    def state(self) -> Any:
        state = super().state
        return state if self._stage or state.stopped else replace(state, status=TrainerStatus.FINISHED if state.fn else TrainerStatus.INITIALIZING)
