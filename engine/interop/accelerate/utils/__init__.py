"""Accelerate's helpers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.interop.accelerate import operations, random_numbers, settings
from engine.interop.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.utils import accelerator, batch_sizes

for _module in (settings, batch_sizes, operations, random_numbers):
    globals().update(
        {name: value for name, value in vars(_module).items() if getattr(value, "__module__", None) == _module.__name__}
    )

SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
OTHERS = {
    **dict.fromkeys(
        (
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
            "dispatch_model",
            "cpu_offload",
            "disk_offload",
            "infer_auto_device_map",
        ),
        "a model over several devices of one process: Engine(strategy='fsdp') or 'deepspeed' shards it over processes, and "
        "Engine.load_state or 'fit checkpoint convert' read its weights",
    ),
    **dict.fromkeys(
        ("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"),
        "Engine(precision={'name': 'fp8-mixed', ...})",
    ),
    **dict.fromkeys(
        ("DummyOptim", "DummyScheduler"),
        "an optimizer or a scheduler of your own; in a Fit run, those of DeepSpeed's configuration",
    ),
    "prepare_pippy": "Engine(strategy={'name': 'mesh', 'pp': 2})",
    "LocalSGD": "synchronize in every step, or average parameters yourself",
}
"""Names without a counterpart of the same kind -> what to use."""


def __getattr__(name: str) -> Any:
    if name in OTHERS:
        return Refused(name)
    if name.startswith("is_") and name.endswith("_available"):
        return lambda *args, **kwargs: available(name[3:-10])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Refused:
    """A name that can be imported, and says at its use what to use instead."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no counterpart of the same kind; instead: {OTHERS[self.name]}")


def available(what: str) -> bool:
    """Whether a package is installed, or this machine has a device or can compute in a format."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if what in ("bf16", "fp16"):
        return accelerator.autocasts_to(device, torch.bfloat16) if what == "bf16" else device.type != "cpu"
    if what in ("cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa", "sdaa"):
        return device.type == what
    return importlib.util.find_spec({"torch_xla": "torch_xla", "bnb": "bitsandbytes"}.get(what, what)) is not None


@contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Modules built in this block have parameters without memory; ``prepare`` initializes them, or a checkpoint does."""
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
