"""Loggers by the names of their trackers, for scripts that read the name from an argument or a file."""

from __future__ import annotations

from typing import Any

from .aim import AimLogger
from .base import Logger
from .mlflow import MLflowLogger
from .tensorboard import TensorBoardLogger
from .trackio import TrackioLogger
from .wandb import WandbLogger

TRACKERS: dict[str, tuple[type[Logger], str]] = {
    "aim": (AimLogger, ""),
    "mlflow": (MLflowLogger, "experiment_name"),
    "tensorboard": (TensorBoardLogger, ""),
    "trackio": (TrackioLogger, "project"),
    "wandb": (WandbLogger, "project"),
}
"""The logger of each tracker, and its argument for the name of the project; empty: its files are in the run's folder."""


def logger_for(tracker: str, project: str | None = None, **options: Any) -> Logger:
    """A logger for the ``tracker`` of this name: ``logger_for("wandb", "digits")`` is ``WandbLogger(project="digits")``.

    Args:
        project: the name under which the tracker files the run, where it has such names.
        options: other arguments of the logger; they win.

    Raises:
        ValueError: an unknown name.
    """
    if tracker not in TRACKERS:
        raise ValueError(f"tracker={tracker!r} is unknown; possible: {', '.join(TRACKERS)}")
    kind, argument = TRACKERS[tracker]
    if argument and project is not None:
        options = {argument: project, **options}
    return kind(**options)
