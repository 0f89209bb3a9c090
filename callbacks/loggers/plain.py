"""Loggers with one or two methods of Lightning's loggers, and an adapter for objects that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from engine import Callback, Run


class PlainLogger(Callback):
    """Base class of small loggers: define ``log_metrics(metrics, step)``, and ``log_hyperparams(params)`` if hyperparameters matter.

    Both are called on rank 0, in the thread of the training. An error in ``log_metrics`` is logged with its traceback, and the run continues
    without this logger; an error in ``log_hyperparams``, at the start, ends the run. For a tracker that answers slowly or fails now and then,
    subclass :class:`callbacks.loggers.Logger` instead: it sends from a thread, and tries again.
    Names and arguments are those of Lightning's loggers; ``step`` counts optimizer steps done.
    """

    is_logger = True
    critical = False
    root_dir: Any = None
    save_dir: Any = None
    name: Any = None
    version: Any = None
    log_dir: Any = None
    experiment: Any = None
    log_metrics: Any

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record the module's hyperparameters, at the start of a training."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Do nothing: this library never calls it."""

    def save(self) -> None:
        """Save the values; called after each ``log_metrics``."""

    def finalize(self, status: str) -> None:
        """End the run in the tracker. ``status``: ``"success"`` or ``"failed"``."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing: only the ``ModelCheckpoint`` of ``engine.interop.lightning`` calls this; define ``on_checkpoint_saved``."""

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if run.is_main_process and run.hyperparameters and stage == "fit":
            self.log_hyperparams(dict(run.hyperparameters))

    def on_log(self, run: Run, module: nn.Module, metrics: Mapping[str, float], step: int) -> None:
        if run.is_main_process:
            self.log_metrics({**metrics, "epoch": run.epoch}, step)
            self.save()

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if run.is_main_process:
            self.finalize("success" if run.exception is None else "failed")


class ForwardingLogger(PlainLogger):
    """Passes values to an object with ``log_metrics``, ``log_hyperparams``, ``save`` and ``finalize``, such as a logger of Lightning::

    Fit(callbacks=[ForwardingLogger(lightning.pytorch.loggers.CometLogger(...))])
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        for name in ("log_metrics", "log_hyperparams", "save", "finalize"):
            setattr(self, name, getattr(logger, name))

    experiment = property(lambda self: self.logger.experiment)
