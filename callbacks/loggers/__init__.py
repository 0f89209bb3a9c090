"""Loggers: callbacks that record logged metrics, one backend per file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base import Logger as Logger
from .base import Moment as Moment

if TYPE_CHECKING:
    from .aim import AimLogger as AimLogger
    from .by_name import TRACKERS as TRACKERS
    from .by_name import logger_for as logger_for
    from .csv import CSVLogger as CSVLogger
    from .jsonl import JSONLLogger as JSONLLogger
    from .mlflow import MLflowLogger as MLflowLogger
    from .own_loop import LoggedLoop as LoggedLoop
    from .plain import ForwardingLogger as ForwardingLogger
    from .plain import PlainLogger as PlainLogger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger
    from .trackio import TrackioLogger as TrackioLogger
    from .wandb import WandbLogger as WandbLogger

_PLACES = {
    "AimLogger": ".aim",
    "CSVLogger": ".csv",
    "ForwardingLogger": ".plain",
    "JSONLLogger": ".jsonl",
    "LoggedLoop": ".own_loop",
    "MLflowLogger": ".mlflow",
    "PlainLogger": ".plain",
    "TensorBoardLogger": ".tensorboard",
    "TrackioLogger": ".trackio",
    "TRACKERS": ".by_name",
    "WandbLogger": ".wandb",
    "logger_for": ".by_name",
}

__all__ = [
    "AimLogger",
    "CSVLogger",
    "ForwardingLogger",
    "JSONLLogger",
    "LoggedLoop",
    "Logger",
    "MLflowLogger",
    "Moment",
    "PlainLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "logger_for",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'callbacks.loggers' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_PLACES[name], __name__), name)
    globals()[name] = value
    return value
