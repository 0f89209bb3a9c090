"""Lightning's small helpers and types, from ``utilities`` and its submodules, ``trainer.states``, ``tuner``, ``accelerators`` and others."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NotRequired, Required, TypeAlias, TypedDict
from warnings import warn

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp as ReduceOp
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engine.compat.accelerate.utils.memory import is_out_of_memory as is_oom_error  # noqa: F401
from engine.compat.accelerate.utils.memory import release_memory as garbage_collection_cuda  # noqa: F401
from engine.compat.lightning.callback import Callback
from engine.compat.lightning.callbacks import ModelSummary as ModelSummary
from engine.compat.lightning.events import RunningStage as RunningStage
from engine.compat.lightning.events import TrainerFn as TrainerFn
from engine.compat.lightning.events import TrainerStatus as TrainerStatus
from engine.compat.lightning.hyperparameters import load_hparams_from_yaml as load_hparams_from_yaml
from engine.compat.lightning.hyperparameters import save_hparams_to_yaml as save_hparams_to_yaml
from engine.compat.lightning.pickled_checkpoint import load as _load  # noqa: F401
from engine.compat.lightning.plugins import CheckpointIO as CheckpointIO
from engine.compat.refusals import refused_class
from engine.config.hyperparameters import HParams as AttributeDict  # noqa: F401
from engine.data.combined import CombinedLoader as CombinedLoader
from engine.data.datamodule import DataModule
from engine.distributed.rank_work import own_rank
from engine.module import TrainModule
from engine.step.schedules import Schedule as LRSchedulerConfig  # noqa: F401
from engine.utils.accelerator import present as present_accelerator
from engine.utils.overrides import overridden
from engine.utils.seed import isolated as isolate_rng  # noqa: F401
from engine.utils.seed import seed_everything as seed_all
from engine.utils.tree import move as move_data_to_device  # noqa: F401

STEP_OUTPUT = EPOCH_OUTPUT = TRAIN_DATALOADERS = EVAL_DATALOADERS = OptimizerLRScheduler = Any
_METRIC = _EVALUATE_OUTPUT = _PREDICT_OUTPUT = _OUT_DICT = _MAP_LOCATION_TYPE = Any
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType = LRSchedulerTypeUnion
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
_PATH = str | Path
MisconfigurationException = ValueError
CUDAAccelerator = refused_class("CUDAAccelerator", "give Trainer(accelerator='cuda')")
CUDAAccelerator.is_available = staticmethod(lambda: present_accelerator() == "cuda")


class LRSchedulerConfigType(TypedDict, total=False):
    """The dict of a scheduler that ``configure_optimizers`` returns."""

    scheduler: Required[LRSchedulerTypeUnion]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """The dict of an optimizer alone."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """The dict of an optimizer and its scheduler."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


GradClipAlgorithmType = StrEnum("GradClipAlgorithmType", {"VALUE": "value", "NORM": "norm"})


def seed_everything(value: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Call :func:`engine.seed_everything`; ``None`` means the variable ``PL_GLOBAL_SEED``, which this function sets, or 0. ``workers`` is ignored:
    they are always seeded."""
    seed = seed_all(int(os.environ.get("PL_GLOBAL_SEED", 0)) if value is None else value)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    return seed


class RankZeroOnly:
    """Decorates functions to run on rank 0 only. ``rank`` is this process's rank, unless the project sets it."""

    _set: int | None = None

    @property
    def rank(self) -> int:
        return own_rank() if self._set is None else self._set

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._set = rank

    def __call__(self, fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        @functools.wraps(fn)
        def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


def tell_lightning_utilities(rank: int) -> None:
    """Set the rank that ``lightning_utilities.core.rank_zero`` needs; other packages use it directly. Nothing happens if it is not installed."""
    if importlib.util.find_spec("lightning_utilities") is not None:
        importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = rank


tell_lightning_utilities(own_rank())
TorchCheckpointIO = CheckpointIO
_logger = logging.getLogger("engine.interop.lightning")
rank_zero_info, rank_zero_debug = rank_zero_only(_logger.info), rank_zero_only(_logger.debug)
rank_zero_warn = rank_zero_deprecation = rank_zero_only(functools.partial(warn, stacklevel=3))


def is_overridden(method_name: str, instance: Any, parent: type | None = None) -> bool:
    """Whether ``instance`` overrides the method of ``parent``, by default of our base class of the instance."""
    kinds = (kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind))
    return overridden(instance, method_name, parent or next(kinds, object))


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's current gradient in this process, and the total norm, under Lightning's names.

    :meth:`engine.Engine.grad_norms` handles gradients that are sharded, scaled, or not yet divided by their accumulation window.
    """
    kind = float(norm_type)
    norms = {n: p.grad.detach().norm(kind) for n, p in module.named_parameters() if p.grad is not None}
    named_norms = {f"grad_{kind}_norm{group_separator}{name}": norm for name, norm in norms.items()}
    return named_norms | ({f"grad_{kind}_norm_total": torch.stack([*norms.values()]).norm(kind)} if norms else {})


def get_init_args(frame: Any) -> dict[str, Any]:
    """The arguments of the ``__init__`` that runs in ``frame``."""
    names, _, keywords_name, values = inspect.getargvalues(frame)
    return {name: values[name] for name in names[1:]} | (values[keywords_name] if keywords_name else {})


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The fsspec file system of a path or URL; ``kwargs`` are its options."""
    return importlib.import_module("fsspec").url_to_fs(str(path), **kwargs)[0]
