"""Accelerate's helpers."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.config.from_accelerate import plugins
from engine.config.from_accelerate.names import ELSEWHERE
from engine.interop.accelerate import operations, random_numbers
from engine.interop.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.interop.refused import refusing
from engine.strategies.deferred_init import parameters_deferred
from engine.utils import accelerator, batch_sizes

_MODULES = {"dataclasses": plugins, "memory": batch_sizes, "operations": operations, "random": random_numbers}
for _name, _module in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _module
    globals().update(
        {name: value for name, value in vars(_module).items() if getattr(value, "__module__", "").startswith("engine.")}
    )

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
