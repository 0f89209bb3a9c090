"""Callbacks for :class:`engine.Fit`: what to show, what to record, when to save and when to stop.

Each is one file and is imported when its name is first used, so that a run pays only for what it attaches. ``engine.callbacks`` is this
package under a second name, for projects that have a ``callbacks.py`` of their own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks.backbone_finetuning import BackboneFinetuning
    from callbacks.batch_size_finder import find_batch_size
    from callbacks.batch_validation import BatchValidation
    from callbacks.device_stats_monitor import DeviceStatsMonitor
    from callbacks.early_stopping import EarlyStopping
    from callbacks.ema import EMA
    from callbacks.finetuning import BaseFinetuning
    from callbacks.gradient_norm import GradientNorm
    from callbacks.lambda_callback import LambdaCallback
    from callbacks.loggers.aim import AimLogger
    from callbacks.loggers.csv import CSVLogger
    from callbacks.loggers.jsonl import JSONLLogger
    from callbacks.loggers.mlflow import MLflowLogger
    from callbacks.loggers.tensorboard import TensorBoardLogger
    from callbacks.loggers.trackio import TrackioLogger
    from callbacks.loggers.wandb import WandbLogger
    from callbacks.lr_finder import find_lr
    from callbacks.lr_monitor import LearningRateMonitor
    from callbacks.model_checkpoint import ModelCheckpoint
    from callbacks.model_summary import ModelSummary
    from callbacks.prediction_writer import BasePredictionWriter, PredictionWriter, read_predictions
    from callbacks.profiler import Profiler
    from callbacks.progress_bar import RichProgressBar
    from callbacks.pruning import Pruning
    from callbacks.replica_check import ReplicaCheck
    from callbacks.report.callback import Report
    from callbacks.report.page import write_report
    from callbacks.servable_module import ServableModule, ServableModuleValidator
    from callbacks.simple_profiler import SimpleProfiler
    from callbacks.spike_guard import SpikeGuard
    from callbacks.straggler_monitor import StragglerMonitor
    from callbacks.swa import SWA
    from callbacks.throughput_monitor import ThroughputMonitor
    from callbacks.tqdm_progress_bar import TQDMProgressBar
    from callbacks.weight_averaging import WeightAveraging

_PLACES = {
    "AimLogger": ".loggers.aim",
    "BackboneFinetuning": ".backbone_finetuning",
    "BaseFinetuning": ".finetuning",
    "BatchValidation": ".batch_validation",
    "BasePredictionWriter": ".prediction_writer",
    "CSVLogger": ".loggers.csv",
    "DeviceStatsMonitor": ".device_stats_monitor",
    "EMA": ".ema",
    "EarlyStopping": ".early_stopping",
    "GradientNorm": ".gradient_norm",
    "JSONLLogger": ".loggers.jsonl",
    "LambdaCallback": ".lambda_callback",
    "LearningRateMonitor": ".lr_monitor",
    "MLflowLogger": ".loggers.mlflow",
    "ModelCheckpoint": ".model_checkpoint",
    "ModelSummary": ".model_summary",
    "PredictionWriter": ".prediction_writer",
    "Profiler": ".profiler",
    "Pruning": ".pruning",
    "ReplicaCheck": ".replica_check",
    "Report": ".report.callback",
    "RichProgressBar": ".progress_bar",
    "SWA": ".swa",
    "ServableModule": ".servable_module",
    "ServableModuleValidator": ".servable_module",
    "SimpleProfiler": ".simple_profiler",
    "SpikeGuard": ".spike_guard",
    "StragglerMonitor": ".straggler_monitor",
    "TQDMProgressBar": ".tqdm_progress_bar",
    "TensorBoardLogger": ".loggers.tensorboard",
    "ThroughputMonitor": ".throughput_monitor",
    "TrackioLogger": ".loggers.trackio",
    "WandbLogger": ".loggers.wandb",
    "WeightAveraging": ".weight_averaging",
    "find_batch_size": ".batch_size_finder",
    "find_lr": ".lr_finder",
    "read_predictions": ".prediction_writer",
    "write_report": ".report.page",
}

__all__ = [
    "EMA",
    "SWA",
    "AimLogger",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchValidation",
    "CSVLogger",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "GradientNorm",
    "JSONLLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "MLflowLogger",
    "ModelCheckpoint",
    "ModelSummary",
    "PredictionWriter",
    "Profiler",
    "Pruning",
    "ReplicaCheck",
    "Report",
    "RichProgressBar",
    "ServableModule",
    "ServableModuleValidator",
    "SimpleProfiler",
    "SpikeGuard",
    "StragglerMonitor",
    "TQDMProgressBar",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "TrackioLogger",
    "WandbLogger",
    "WeightAveraging",
    "find_batch_size",
    "find_lr",
    "read_predictions",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'callbacks' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_PLACES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
