"""Lightning's names over this library: ``import engine.interop.lightning as L``, and a Lightning project runs.

Submodules have Lightning's paths (``callbacks.early_stopping``, ``utilities.types``, ``pytorch.trainer.states``); several of them are one file here.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from engine.data.combined_loaders import CombinedLoader as CombinedLoader
from engine.interop.lightning import callbacks as callbacks
from engine.interop.lightning import cli as cli
from engine.interop.lightning import loggers as loggers
from engine.interop.lightning import module as core
from engine.interop.lightning import strategies as strategies
from engine.interop.lightning import trainer as trainer
from engine.interop.lightning import utilities as utilities
from engine.interop.lightning.callback import Callback as Callback
from engine.interop.lightning.foreign import adapt as adapt
from engine.interop.lightning.module import LightningDataModule as LightningDataModule
from engine.interop.lightning.module import LightningModule as LightningModule
from engine.interop.lightning.trainer import Trainer as Trainer
from engine.interop.lightning.utilities import seed_everything as seed_everything

_CALLBACKS = """callback checkpoint device_stats_monitor early_stopping finetuning gradient_accumulation_scheduler lambda_function lr_finder
    lr_monitor model_checkpoint model_summary batch_size_finder prediction_writer progress progress.rich_progress progress.tqdm_progress
    progress.progress_bar pruning stochastic_weight_avg timer weight_averaging on_exception_checkpoint rich_model_summary"""
_SERVE = ("serve.servable_module", "serve.servable_module_validator")
_UTILITIES = "types rank_zero exceptions combined_loader seed enums model_helpers parsing grads distributed model_summary apply_func memory"
_HELPERS = """trainer.states trainer.connectors.logger_connector.result tuner tuner.tuning accelerators accelerators.accelerator
    loops loops.evaluation_loop loops.fit_loop loops.prediction_loop plugins plugins.io plugins.io.torch_io
    fabric fabric.utilities fabric.utilities.cloud_io fabric.utilities.types fabric.utilities.seed fabric.utilities.rank_zero"""
_PATHS = {
    callbacks: [
        "callbacks",
        "profilers",
        "serve",
        "serve.servable_module",
        "serve.servable_module_validator",
        *(f"callbacks.{name}" for name in _CALLBACKS.split()),
    ],
    core: ["core", *(f"core.{name}" for name in ["module", "datamodule", "mixins", "hooks", "optimizer", "saving"])],
    loggers: [
        "loggers",
        *(f"loggers.{name}" for name in ["logger", "base", "csv_logs", "tensorboard", "wandb", "mlflow"]),
    ],
    strategies: [
        "strategies",
        *(f"strategies.{name}" for name in ["ddp", "fsdp", "deepspeed", "strategy", "model_parallel"]),
    ],
    trainer: ["trainer", "trainer.trainer"],
    utilities: ["utilities", *_HELPERS.split(), *(f"utilities.{name}" for name in _UTILITIES.split())],
    cli: ["cli"],
}
pytorch = sys.modules[__name__]
profilers = serve = callbacks
tuner = accelerators = loops = plugins = utilities
_ELSEWHERE = {"Fabric": ": use engine.Engine"}
sys.modules[f"{__name__}.pytorch"] = pytorch
for _file, _paths in _PATHS.items():
    for _path in _paths:
        sys.modules[f"{__name__}.{_path}"] = sys.modules[f"{__name__}.pytorch.{_path}"] = _file


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_ELSEWHERE.get(name, '')}")
