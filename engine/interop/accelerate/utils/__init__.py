"""Accelerate's helpers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.config.from_accelerate import plugins
from engine.config.from_accelerate.names import ELSEWHERE
from engine.config.refusals import refusing
from engine.distributed.random_states import share_states
from engine.interop.accelerate import operations
from engine.interop.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.interop.accelerate.state import PartialState
from engine.strategies.deferred_init import parameters_deferred
from engine.utils import accelerator, batch_sizes
from engine.utils.seed import seed_everything

_MODULES = {"dataclasses": plugins, "memory": batch_sizes, "operations": operations}
for _name, _module in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    globals().update(
        {name: value for name, value in vars(_module).items() if getattr(value, "__module__", "").startswith("engine.")}
    )

sys.modules[f"{__name__}.random"] = sys.modules[__name__]
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
_refused = refusing(__name__, ELSEWHERE)


def __getattr__(name: str) -> Any:
    if name.startswith("is_") and name.endswith("_available"):
        return lambda *args, **kwargs: available(name[3:-10])
    return _refused(name)


def available(what: str) -> bool:
    """Whether a package is installed, or this machine has a device or can compute in a format."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if what in ("bf16", "fp16"):
        return accelerator.autocasts_to(device, torch.bfloat16) if what == "bf16" else device.type != "cpu"
    if what in ("cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa"):
        return device.type == what
    return importlib.util.find_spec({"torch_xla": "torch_xla", "bnb": "bitsandbytes"}.get(what, what)) is not None


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Modules built in this block have parameters without memory; ``prepare`` initializes them, or a checkpoint does."""
    return torch.device("meta") if include_buffers else parameters_deferred()


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, plus the rank if ``device_specific``; the order of data prepared from now on depends on it too."""
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    share_states(PartialState().group, rng_types, generator)
