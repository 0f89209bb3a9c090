"""Lightning's names over this library: ``import engine.interop.lightning as L``, and a Lightning project runs.

Submodules have Lightning's paths too (``callbacks.early_stopping``, ``utilities.types``, ``trainer.states``, ``pytorch.callbacks``): the names of
several of them stand in one file here.
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
from engine.utils.seed import seed_everything as seed_everything

_PATHS = {
    callbacks: "callbacks callbacks.callback callbacks.checkpoint callbacks.device_stats_monitor callbacks.early_stopping callbacks.finetuning "
    "callbacks.gradient_accumulation_scheduler callbacks.lambda_function callbacks.lr_finder callbacks.lr_monitor callbacks.model_checkpoint "
    "callbacks.model_summary callbacks.batch_size_finder callbacks.prediction_writer callbacks.progress callbacks.progress.rich_progress "
    "callbacks.progress.tqdm_progress callbacks.progress.progress_bar callbacks.pruning callbacks.stochastic_weight_avg callbacks.timer "
    "callbacks.weight_averaging callbacks.on_exception_checkpoint callbacks.rich_model_summary profilers",
    core: "core core.module core.datamodule core.mixins core.hooks core.optimizer core.saving",
    loggers: "loggers loggers.logger loggers.base loggers.csv_logs loggers.tensorboard loggers.wandb loggers.mlflow",
    strategies: "strategies strategies.ddp strategies.fsdp strategies.deepspeed strategies.strategy strategies.model_parallel",
    trainer: "trainer trainer.trainer",
    utilities: "utilities utilities.types utilities.rank_zero utilities.exceptions utilities.combined_loader utilities.seed utilities.enums "
    "utilities.model_helpers utilities.parsing utilities.grads utilities.distributed trainer.states tuner tuner.tuning accelerators",
    cli: "cli",
}
pytorch = sys.modules[__name__]
tuner = utilities
profilers = callbacks
_ELSEWHERE = {
    "Fabric": "use engine.Engine",
    "plugins": "use Trainer(precision=..., strategy=...)",
    "demos": "Lightning's own",
}
sys.modules[f"{__name__}.pytorch"] = pytorch
for _file, _paths in _PATHS.items():
    for _path in _paths.split():
        sys.modules[f"{__name__}.{_path}"] = sys.modules[f"{__name__}.pytorch.{_path}"] = _file


def __getattr__(name: str) -> NoReturn:
    said = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{said}")
