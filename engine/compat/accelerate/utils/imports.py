"""Accelerate's functions ``is_..._available``: which packages are installed, and what this machine supports."""

from __future__ import annotations

import importlib.util

import torch

from engine.utils import accelerator


def available(what: str) -> bool:
    """Whether this machine supports the dtype ``"bf16"`` or ``"fp16"``, has the device type, or has the package ``what``."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if what in ("bf16", "fp16"):
        return accelerator.autocasts_to(device, torch.bfloat16) if what == "bf16" else device.type != "cpu"
    if what in ("cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa"):
        return device.type == what
    return importlib.util.find_spec({"torch_xla": "torch_xla", "bnb": "bitsandbytes"}.get(what, what)) is not None
