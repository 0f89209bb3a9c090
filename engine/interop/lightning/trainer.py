"""``Trainer``: Lightning's arguments, methods and attributes over :class:`engine.Fit`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from engine.fit import Fit
from engine.interop.lightning.arguments import InBatches, Translated, translate
from engine.interop.lightning.callback import adapted
from engine.interop.lightning.callbacks import Checkpoint, EarlyStopping, ProgressBar
from engine.interop.lightning.ckpt import readable
from engine.interop.lightning.loggers import AdaptedLogger, WrappedLogger
from engine.interop.lightning.module import LightningModule
from engine.loop.run import Run


class Trainer:
    """Trains as Lightning's; each argument becomes one of :class:`engine.Fit`, or is an error that names the counterpart.

    ``run`` is the :class:`engine.Run` under way, or the latest one.
    """

    run: Any = None

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: Any = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        found = translate(given)
        self._translated: Translated = found
        self.callbacks: list[Any] = found.callbacks
        self.loggers: list[Any] = found.loggers
        self.default_root_dir = str(default_root_dir or ".")
        self.barebones = barebones
        self.datamodule: Any = None
        self._module: Any = None
        self.result: Any = None
        self._fit = Fit(**found.settings, callbacks=[*map(_logger, self.loggers), *self._adapted()])

    def _adapted(self) -> list[Any]:
        return [
            adapted(each) for each in [*self._translated.extra, *self.callbacks] if not getattr(each, "idle", False)
        ]

    # -- runs ---------------------------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``. ``ckpt_path``: resume from this checkpoint; ``"last"``: the newest, if there is one."""
        train, datamodule = self._enter(model, train_dataloaders, datamodule)
        with readable("auto" if ckpt_path == "last" else ckpt_path) as resume:
            self.result = self._fit.run(model, train, val_dataloaders, datamodule=datamodule, resume=resume)

    def validate(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True, datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """One dict of metrics per loader."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, datamodule, verbose)

    def test(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, verbose: bool = True, datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """One dict of metrics per loader."""
        return self._evaluate("test", model, dataloaders, ckpt_path, datamodule, verbose)

    def predict(
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        ckpt_path: Any = None, weights_only: bool | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """The outputs of ``predict_step``, of all ranks in the data's order; one list per loader if there are several."""
        model, ckpt_path = self._which(model, ckpt_path)
        data, datamodule = self._enter(model, dataloaders, datamodule)
        keep = return_predictions is not False
        with readable(ckpt_path) as checkpoint:
            found = self._fit.predict(
                model, data, datamodule=datamodule, checkpoint=checkpoint, return_predictions=keep
            )
        return found if keep else None

    def _evaluate(
        self, verb: str, model: Any, loaders: Any, ckpt_path: Any, datamodule: Any, verbose: bool
    ) -> list[dict[str, float]]:
        model, ckpt_path = self._which(model, ckpt_path)
        data, datamodule = self._enter(model, loaders, datamodule)
        with readable(ckpt_path) as checkpoint:
            found: list[dict[str, float]] = getattr(self._fit, verb)(
                model, data, datamodule=datamodule, checkpoint=checkpoint
            )
        if verbose and self.progress_bar_callback is None:
            for number, metrics in enumerate(found):
                self.print(f"{verb} {number}: " + ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        return found

    def _which(self, model: Any, ckpt_path: Any) -> tuple[Any, Any]:
        """The model, and the checkpoint to load: without a model, the best one of the model trained last."""
        if model is None and self._module is None:
            raise TypeError("give a model: this trainer has trained none")
        if model is None and ckpt_path is None and self.checkpoint_callback is not None:
            ckpt_path = "best"
        if ckpt_path == "best":
            ckpt_path = getattr(self.checkpoint_callback, "best_model_path", None) or "best"
        return self._module if model is None else model, ckpt_path

    def _enter(self, model: Any, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
        if datamodule is None and hasattr(loaders, "prepare_data") and hasattr(loaders, "setup"):
            loaders, datamodule = None, loaders
        self._module, self.datamodule = model, datamodule
        if isinstance(model, LightningModule):
            model.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        return loaders, datamodule

    def joins(self, run: Run) -> None:
        """A run starts; called by the module."""
        self.run, run.trainer = run, self
        for logger in self.loggers:
            if isinstance(logger, WrappedLogger):
                logger.joins(run)
        if self._translated.val_check_interval is not None:
            run.val_every = InBatches(
                run, self._translated.val_check_interval, self._translated.check_val_every_n_epoch
            )

    # -- what a Lightning project reads -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Any:
        """What ``Fit`` was given."""
        return self._fit.settings

    @property
    def lightning_module(self) -> Any:
        """The module trained last."""
        return self._module

    model = lightning_module

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0; after a training, the number of epochs done."""
        return 0 if self.run is None else int(self.run.epoch)

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.run is None else int(self.run.step)

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The latest value of everything logged."""
        return {} if self.run is None else {name: torch.tensor(value) for name, value in self.run.metrics.items()}

    logged_metrics = callback_metrics

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Those of :attr:`callbacks` that save checkpoints."""
        return [each for each in self.callbacks if isinstance(each, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        """The first of :attr:`checkpoint_callbacks`."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> Any:
        """The first ``EarlyStopping``."""
        return next((each for each in self.callbacks if isinstance(each, EarlyStopping)), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar."""
        return next((each for each in self.callbacks if isinstance(each, ProgressBar)), None)

    @property
    def logger(self) -> Any:
        """The first of :attr:`loggers`."""
        return next(iter(self.loggers), None)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, on rank 0 only."""
        if self._fit.is_main_process:
            print(*args, **kwargs)


def _logger(logger: Any) -> Any:
    return logger.ours if isinstance(logger, WrappedLogger) else AdaptedLogger(logger)
