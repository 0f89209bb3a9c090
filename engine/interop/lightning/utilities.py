"""Lightning's small helpers and types: ``utilities`` with its submodules, and ``trainer.states``."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from engine.config.hyperparameters import HParams
from engine.data.combined_loaders import CombinedLoader as CombinedLoader
from engine.data.datamodule import DataModule
from engine.distributed.environment import detect
from engine.interop.lightning.callback import Callback
from engine.interop.lightning.refused import refused_class
from engine.module import TrainModule
from engine.step.optimizers import Schedule
from engine.utils.overrides import overridden
from engine.utils.seed import isolated
from engine.utils.tree import move

STEP_OUTPUT = EPOCH_OUTPUT = TRAIN_DATALOADERS = EVAL_DATALOADERS = OptimizerLRScheduler = LRSchedulerTypeUnion = Any
_METRIC = _EVALUATE_OUTPUT = _PREDICT_OUTPUT = _OUT_DICT = _PATH = LRSchedulerPLType = LRSchedulerConfigType = Any
OptimizerConfig = OptimizerLRSchedulerConfig = Any
LRSchedulerConfig = Schedule
AttributeDict = HParams
MisconfigurationException = ValueError
isolate_rng = isolated
Tuner = refused_class("Tuner", "call callbacks.find_lr(module, loader) or find_batch_size, and set what it finds")
Accelerator = CPUAccelerator = CUDAAccelerator = refused_class(
    "Accelerator", "give Trainer(accelerator='cpu' or 'gpu')"
)


class TrainerFn(StrEnum):
    """What a trainer was called for."""

    FITTING, VALIDATING, TESTING, PREDICTING = "fit", "validate", "test", "predict"


class RunningStage(StrEnum):
    """What is under way."""

    TRAINING, SANITY_CHECKING, VALIDATING, TESTING, PREDICTING = "train", "sanity_check", "validate", "test", "predict"

    @property
    def evaluating(self) -> bool:
        """Validating or testing."""
        return self in (self.VALIDATING, self.TESTING, self.SANITY_CHECKING)


class TrainerStatus(StrEnum):
    """How far a trainer is."""

    INITIALIZING, RUNNING, FINISHED, INTERRUPTED = "initializing", "running", "finished", "interrupted"


class GradClipAlgorithmType(StrEnum):
    """``gradient_clip_algorithm``."""

    VALUE, NORM = "value", "norm"


def rank_zero_only(function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """Decorator: the ``function`` runs on rank 0; other ranks get ``default``."""

    @functools.wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if detect(os.environ).rank == 0 else default

    return on_rank_zero


_log = logging.getLogger("engine.interop.lightning")
rank_zero_info = rank_zero_only(_log.info)
rank_zero_debug = rank_zero_only(_log.debug)
rank_zero_warn = rank_zero_deprecation = rank_zero_only(functools.partial(warnings.warn, stacklevel=3))


def is_overridden(method_name: str, instance: Any, parent: type | None = None) -> bool:
    """Whether ``instance`` overrides this method of ``parent``, by default of our class."""
    known = (kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind))
    base = parent or next(known, None)
    if base is None:
        raise ValueError("is_overridden: give a parent")
    return overridden(instance, method_name, base)


def get_init_args(frame: Any) -> dict[str, Any]:
    """The arguments of the ``__init__`` that runs in ``frame``."""
    _, _, _, values = inspect.getargvalues(frame)
    cls = values.get("__class__")
    if cls is None:
        return {}
    own = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "args", "kwargs")]
    return {name: values[name] for name in own if name in values} | values.get("kwargs", {})


def move_data_to_device(batch: Any, device: Any) -> Any:
    """The tensors of ``batch`` on the ``device``."""
    return move(batch, torch.device(device))


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """The norm of each parameter's gradient, and of all together."""
    kind = float(norm_type)
    each = {n: p.grad.detach().norm(kind) for n, p in module.named_parameters() if p.grad is not None}
    found = {f"grad_{kind}_norm{group_separator}{name}": norm for name, norm in each.items()}
    return found | ({f"grad_{kind}_norm_total": torch.stack([*each.values()]).norm(kind)} if each else {})
