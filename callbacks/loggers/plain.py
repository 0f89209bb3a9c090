"""Loggers of one or two methods, and loggers that others have written with these methods, such as Lightning's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from engine import Callback, Run


class PlainLogger(Callback):
    """Subclass it and define ``log_metrics(metrics, step)``, and ``log_hyperparams(params)`` where they matter; both are called on rank 0, at once.

    An error in one of them is logged with its traceback, and the run continues without this logger; in ``log_hyperparams``, at the start, it
    ends the run. For a tracker that answers slowly or fails now and then, subclass :class:`callbacks.loggers.Logger` instead: it sends from a
    thread, and tries again.
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
        """Not called."""

    def save(self) -> None:
        """Called after each ``log_metrics``."""

    def finalize(self, status: str) -> None:
        """The end: ``"success"`` or ``"failed"``."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Not called: ``on_checkpoint_saved`` is."""

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
    """Any object with ``log_metrics``, ``log_hyperparams``, ``save`` and ``finalize``, such as a logger of the installed Lightning, in a run::

    Fit(callbacks=[ForwardingLogger(lightning.pytorch.loggers.CometLogger(...))])
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        for name in ("log_metrics", "log_hyperparams", "save", "finalize"):
            setattr(self, name, getattr(logger, name))

    experiment = property(lambda self: self.logger.experiment)
