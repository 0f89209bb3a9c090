"""Loggers in a loop of your own, without ``Fit``, and loggers by the names of their trackers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn

from engine import Run

from .aim import AimLogger
from .base import Logger
from .mlflow import MLflowLogger
from .tensorboard import TensorBoardLogger
from .trackio import TrackioLogger
from .wandb import WandbLogger


class _LoopRun:
    """The attributes of a run that loggers read, for a loop without a run."""

    interrupted = values_are_partial = False
    exception: BaseException | None = None
    epoch = step = samples = 0

    def __init__(self, folder: Path, hyperparameters: Mapping[str, Any], is_main_process: bool) -> None:
        self.folder, self.hyperparameters, self.is_main_process = folder, dict(hyperparameters), is_main_process
        self.id = uuid.uuid4().hex
        self.config: dict[str, Any] = {}
        self.status = "completed"

    def result(self) -> _LoopRun:
        return self

    def config_as_yaml(self) -> str:
        return json.dumps(self.hyperparameters, indent=2, default=str) + "\n"


class LoggedLoop:
    """Sends the values of a loop of your own to loggers, on the main process::

        with LoggedLoop([CSVLogger()], "runs/one", {"lr": 0.1}, is_main_process=engine.is_main_process) as log:
            for step, batch in enumerate(loader, 1):
                ...
                log({"loss": loss}, step=step)

    Args:
        folder: the loop's folder; loggers without a folder of their own write into it.
        hyperparameters: hyperparameters that trackers show next to the values.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        folder: str | Path,
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        is_main_process: bool = True,
    ) -> None:
        self.loggers = list(loggers)
        self._loop_run = _LoopRun(Path(folder).expanduser(), hyperparameters or {}, is_main_process)
        self._run = cast(Run, self._loop_run)
        self._module = nn.Module()  # loggers do not look at it
        for logger in self.loggers:
            logger.setup(self._run, self._module, "fit")
            logger.on_train_start(self._run, self._module)

    def __call__(self, values: Mapping[str, Any], step: int | None = None, *, epoch: int = 0, samples: int = 0) -> None:
        """Log numbers and texts.

        Args:
            step: optimizer steps done; ``None``: one more than before.
            epoch, samples: as the loggers record them.
        """
        loop_run = self._loop_run
        loop_run.step = loop_run.step + 1 if step is None else step
        loop_run.epoch, loop_run.samples = epoch, samples
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = {name: float(value) for name, value in values.items() if name not in texts}
        for logger in self.loggers if loop_run.is_main_process else ():
            if numbers:
                logger.on_log(self._run, self._module, numbers, loop_run.step)
            for name, value in texts.items():
                logger.on_media(self._run, self._module, "text", name, value, {})

    def close(self, error: BaseException | None = None) -> None:
        """Send what waits, and close the loggers. Later calls do nothing."""
        self._loop_run.exception = error
        loggers, self.loggers = self.loggers, []
        for logger in loggers:
            logger.teardown(self._run, self._module, "fit")

    def __enter__(self) -> LoggedLoop:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)


TRACKERS: dict[str, tuple[type[Logger], str]] = {
    "aim": (AimLogger, ""),
    "mlflow": (MLflowLogger, "experiment_name"),
    "tensorboard": (TensorBoardLogger, ""),
    "trackio": (TrackioLogger, "project"),
    "wandb": (WandbLogger, "project"),
}
"""Tracker -> its logger, and the logger's argument for the project's name; empty: the files are in the run's folder."""


def logger_for(tracker: str, project: str | None = None, **options: Any) -> Logger:
    """Create the logger of a ``tracker``: ``logger_for("wandb", "digits")`` is ``WandbLogger(project="digits")``.

    Args:
        project: name of the project or experiment in the tracker, if the tracker has projects.
        options: other arguments of the logger; they win over ``project``.

    Raises:
        ValueError: ``tracker`` is unknown.
    """
    if tracker not in TRACKERS:
        raise ValueError(f"tracker={tracker!r} is unknown; possible: {', '.join(TRACKERS)}")
    kind, argument = TRACKERS[tracker]
    if argument and project is not None:
        options = {argument: project, **options}
    return kind(**options)
