"""Saving, loading and unwrapping, as Accelerate's helpers do."""

from __future__ import annotations

import codecs
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from engine.compat.accelerate.state import PartialState

_OF_NUMPY: list[Any] = [
    *(numpy.zeros(0).__reduce__()[0], numpy.ndarray, numpy.dtype, codecs.encode),
    *{type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code not in "OSUVMm"},
]
"""Classes and functions in a pickle of an array: numbers and their type."""


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
    """Wait until all processes have called this."""
    PartialState().wait_for_everyone()
