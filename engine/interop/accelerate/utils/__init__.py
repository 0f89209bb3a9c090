"""Accelerate's helpers."""

from __future__ import annotations

import codecs
import importlib.metadata
import importlib.util
import operator
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from packaging.version import Version
from safetensors.torch import save_file
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from engine.config.from_accelerate import plugins
from engine.config.from_accelerate.names import ELSEWHERE
from engine.config.other_trainers import refusing
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
_COMPARISONS = {
    ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<=": operator.le, "<": operator.lt
}  # fmt: skip
_OF_NUMPY: list[Any] = [
    *(numpy.zeros(0).__reduce__()[0], numpy.ndarray, numpy.dtype, codecs.encode),
    *{type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code not in "OSUVMm"},
]
"""What a pickle of an array consists of: numbers and their type."""
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


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save on the main process, or on one of each machine, as ``torch.save`` does, or (``safe_serialization``) as safetensors."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        (save_file if safe_serialization else torch.save)(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load``, which by default reads tensors, plain values and NumPy's arrays only."""
    with torch.serialization.safe_globals(_OF_NUMPY):
        return torch.load(f, map_location=map_location, **kwargs)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The user's module in a prepared one, as :meth:`Accelerator.unwrap_model` returns it; the other arguments change nothing."""
    while isinstance(model, (DistributedDataParallel, DataParallel)) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def wait_for_everyone() -> None:
    """Wait until all processes are here."""
    PartialState().wait_for_everyone()


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a version, or that of an installed package, compares so with another one: ``compare_versions("torch", ">=", "2.9")``."""
    found = library_or_version
    found = found if isinstance(found, Version) else Version(importlib.metadata.version(found))
    if operation not in _COMPARISONS:
        raise ValueError(f"compare_versions(operation={operation!r}): possible are {', '.join(_COMPARISONS)}")
    return bool(_COMPARISONS[operation](found, Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version, with the part after ``+``, compares so with another one."""
    return compare_versions(Version(torch.__version__), operation, version)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, plus the rank if ``device_specific``; the order of data prepared from now on depends on it too."""
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    share_states(PartialState().group, rng_types, generator)
