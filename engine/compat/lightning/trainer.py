"""``Trainer``: :class:`engine.Fit` with Lightning's arguments, methods and attributes."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.callback import Callback
from engine.compat.checked_arguments import checking_arguments
from engine.compat.lightning import pickled_checkpoint
from engine.compat.lightning.adapters import adapt
from engine.compat.lightning.before_run import BeforeRun
from engine.compat.lightning.callback import Callback as NamedCallback
from engine.compat.lightning.events import TrainerStatus, original
from engine.compat.lightning.loggers import AdaptedLogger, Logger, WrappedLogger
from engine.compat.lightning.module import LightningModule
from engine.compat.lightning.trainer_parts import AcceleratorConnector as _AcceleratorConnector  # noqa: F401  # packages import it from there
from engine.compat.lightning.trainer_translation import translate
from engine.compat.lightning.trainer_view import TrainerView, Values
from engine.compat.lightning.utilities import tell_lightning_utilities
from engine.compat.refusals import refuse_stand_ins
from engine.fit import Fit
from engine.loop.run import Run
from engine.loop.state import Result
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
        check_val_every_n_epoch: int | None = 1, num_sanity_val_steps: int | None = None, log_every_n_steps: int | None = None,
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
        translation = translate(arguments)
        self._arguments, self._callbacks, self._loggers = arguments, translation.callbacks, translation.loggers
        active = [*translation.other_callbacks, *(callback for callback in translation.callbacks if not getattr(callback, "idle", False))]
        self._fit = Fit(**translation.settings, callbacks=[*map(_logger, translation.loggers), *map(adapt, active)])
        self._module: Any = None
        self._trained: Run | None = None
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
        pickled_checkpoint.check_complete(ckpt_path)
        with pickled_checkpoint.readable("auto" if ckpt_path == "last" else ckpt_path, self._arguments["plugins"]) as resume:
            self.result = self._fit.run(model, loaders, val_dataloaders, datamodule=datamodule, resume=resume)

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
        with pickled_checkpoint.readable(ckpt_path, self._arguments["plugins"]) as checkpoint:
            results = getattr(self._fit, verb)(model, loaders, datamodule=datamodule, checkpoint=checkpoint, **options)
        if verbose and self.progress_bar_callback is None:
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

    def attach_run(self, run: Run) -> None:
        """Make ``run``, which is starting, the trainer's current run; called by the module."""
        if run.world_size > 1 and not self._arguments["use_distributed_sampler"]:
            argument = "use_distributed_sampler"
            raise ValueError(f"Trainer({argument}=False) has no counterpart on {run.world_size} ranks{hint('setting', argument)}")
        if run.stage == "fit":
            self._continue_counters(run)
            self._trained = run
        self._run, run.trainer = run, self
        tell_lightning_utilities(run.rank)
        for entry in self._loggers:
            if isinstance(entry, WrappedLogger):
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

    # -- attributes that differ from the view's -----------------------------------------------------------------------------------

    device_ids = property(lambda self: [*range(self.num_devices)], doc="One index per process of this machine.")
    callbacks = property(lambda self: self._callbacks, doc="The given callbacks and Lightning's default ones.")
    loggers = property(lambda self: self._loggers, doc="The given loggers, or Lightning's default one.")
    logger = property(lambda self: next(iter(self._loggers), None), doc="The first of :attr:`loggers`, or ``None``.")
    model = lightning_module = property(lambda self: original(self._module), doc="The module.")
    datamodule = property(lambda self: original(self._datamodule), doc="The data module, or ``None``.")
    default_root_dir = property(lambda self: str(self._arguments["default_root_dir"] or "."), doc="The argument of this name.")

    @property
    def _training(self) -> Run | BeforeRun:
        return self._trained or self._run

    @property
    def callback_metrics(self) -> Values:
        return Values() if isinstance(self._run, BeforeRun) else super().callback_metrics

    @property
    def _stage(self) -> str:
        return super()._stage if self._module is not None and self._module.attached else ""

    @property
    def state(self) -> Any:
        state = super().state
        return state if self._stage or state.stopped else replace(state, status=TrainerStatus.FINISHED if state.fn else TrainerStatus.INITIALIZING)


def _logger(logger: Any) -> Any:
    """The logger to pass to ``Fit``: the one inside a wrapper, one of ours as it is, any other object adapted."""
    if isinstance(logger, WrappedLogger):
        return logger.ours
    return logger if isinstance(logger, Logger) else AdaptedLogger(logger)
