"""Lightning's small helpers and types: ``utilities`` with its submodules, ``trainer.states``, ``tuner``, ``accelerators``."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from enum import StrEnum
from typing import Any

from engine.config.from_lightning.plugins import CheckpointIO as CheckpointIO
from engine.config.hyperparameters import HParams as AttributeDict  # noqa: F401
from engine.config.lightning_names import CLASSES
from engine.config.refusals import refused_class, refusing
from engine.data.combined_loaders import CombinedLoader as CombinedLoader
from engine.data.datamodule import DataModule
from engine.distributed.rank_zero import rank_zero_only as rank_zero_only
from engine.interop.lightning.callback import Callback
from engine.interop.lightning.callbacks import ModelSummary as ModelSummary
from engine.interop.lightning.ckpt import load as _load  # noqa: F401
from engine.module import TrainModule
from engine.step.gradient_norms import grad_norm as grad_norm
from engine.step.optimizers import Schedule as LRSchedulerConfig  # noqa: F401
from engine.utils import accelerator, seed
from engine.utils.batch_sizes import is_out_of_memory as is_oom_error  # noqa: F401
from engine.utils.batch_sizes import release_memory as garbage_collection_cuda  # noqa: F401
from engine.utils.overrides import overridden
from engine.utils.seed import isolated as isolate_rng  # noqa: F401
from engine.utils.tree import move as move_data_to_device  # noqa: F401

STEP_OUTPUT = EPOCH_OUTPUT = TRAIN_DATALOADERS = EVAL_DATALOADERS = OptimizerLRScheduler = LRSchedulerTypeUnion = Any
_METRIC = _EVALUATE_OUTPUT = _PREDICT_OUTPUT = _OUT_DICT = _PATH = _MAP_LOCATION_TYPE = LRSchedulerPLType = Any
OptimizerConfig = OptimizerLRSchedulerConfig = LRSchedulerConfigType = Any
MisconfigurationException = ValueError
__getattr__ = refusing(__name__, CLASSES)
CUDAAccelerator = refused_class("CUDAAccelerator", "give Trainer(accelerator='cuda')")
CUDAAccelerator.is_available = staticmethod(lambda: accelerator.present() == "cuda")


TrainerFn = StrEnum(
    "TrainerFn", {"FITTING": "fit", "VALIDATING": "validate", "TESTING": "test", "PREDICTING": "predict"}
)
GradClipAlgorithmType = StrEnum("GradClipAlgorithmType", {"VALUE": "value", "NORM": "norm"})


class RunningStage(StrEnum):
    TRAINING, SANITY_CHECKING, VALIDATING, TESTING, PREDICTING = "train", "sanity_check", "validate", "test", "predict"


class TrainerStatus(StrEnum):
    INITIALIZING, RUNNING, FINISHED, INTERRUPTED = "initializing", "running", "finished", "interrupted"


def seed_everything(value: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """:func:`engine.seed_everything`; ``None``: ``PL_GLOBAL_SEED``, else 0. Loaders' ``workers`` have seeds of their own in any case."""
    return seed.seed_everything(int(os.environ.get("PL_GLOBAL_SEED", 0)) if value is None else value)


TorchCheckpointIO = CheckpointIO
_logger = logging.getLogger("engine.interop.lightning")
rank_zero_info, rank_zero_debug = rank_zero_only(_logger.info), rank_zero_only(_logger.debug)
rank_zero_warn = rank_zero_deprecation = rank_zero_only(functools.partial(warnings.warn, stacklevel=3))


def is_overridden(method_name: str, instance: Any, parent: type | None = None) -> bool:
    """Whether ``instance`` overrides this method of ``parent``, by default of our class."""
    known = (kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind))
    return overridden(instance, method_name, parent or next(known, object))


def get_init_args(frame: Any) -> dict[str, Any]:
    """The arguments of the ``__init__`` that runs in ``frame``."""
    names, _, rest, values = inspect.getargvalues(frame)
    return {name: values[name] for name in names[1:]} | (values[rest] if rest else {})
