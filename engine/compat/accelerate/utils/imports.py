"""Accelerate's functions ``is_..._available``: which packages are installed, and what this machine supports."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import distributed as dist

from engine.compat.key_file import flag
from engine.utils import accelerator, cuda

_DEVICES = ("cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa", "neuron")
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "fp8": ("torchao", "transformer_engine", "msamp"),
    "lomo": ("lomo_optim",),
    "torchdata_stateful_dataloader": ("torchdata.stateful_dataloader",),
    **dict.fromkeys(("bnb", "4bit_bnb", "8bit_bnb"), ("bitsandbytes",)),
}
"""Name in ``is_..._available`` -> the packages one of which it needs, where that is not the name itself."""
_OF_TORCH = ("weights_only", "pippy", "numpy")
"""Names whose answer is yes with every torch that this library supports."""


def available(what: str) -> bool:
    """Whether this machine supports the dtype ``"bf16"`` or ``"fp16"``, has the device type, or has the package ``what``."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if what in ("bf16", "fp16"):
        return accelerator.autocasts_to(device, torch.bfloat16) if what == "bf16" else device.type != "cpu"
    if what in _DEVICES:
        return device.type == what
    if what == "rocm":
        return cuda.toolkit().startswith("ROCm") and device.type == "cuda"
    if what == "torch_distributed":
        return dist.is_available()
    if what == "xccl":
        return dist.is_available() and dist.is_xccl_available()
    if what == "megatron_lm":
        return flag(os.environ.get("ACCELERATE_USE_MEGATRON_LM", "")) and _is_installed("megatron")
    if what == "rich" and not flag(os.environ.get("ACCELERATE_ENABLE_RICH", "")):
        return False
    return what in _OF_TORCH or any(map(_is_installed, _PACKAGES.get(what, (what,))))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def __getattr__(name: str) -> Any:
    if not name.startswith("is_") or not name.endswith("_available"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def is_available(*args: Any, **kwargs: Any) -> bool:
        return available(name[3:-10])

    return is_available
