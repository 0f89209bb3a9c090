"""Accelerate's helpers for saving, loading and unwrapping."""

from __future__ import annotations

import codecs
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from engine.checkpoint.json_tree import same_memory
from engine.compat.accelerate.state import PartialState

_NUMPY_GLOBALS: list[Any] = [
    *(numpy.zeros(0).__reduce__()[0], numpy.ndarray, numpy.dtype, codecs.encode),
    *{type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code not in "OSUVMm"},
]
"""The classes and functions that the pickle of a numeric NumPy array needs."""


def written(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Save with ``torch.save``, or as safetensors: there, tensors that share their memory are written once, under the first of their names."""
    if not safe_serialization:
        torch.save(obj, f)
        return
    first_names: dict[Any, str] = {}
    names = [name for name, tensor in obj.items() if first_names.setdefault(same_memory(tensor), name) == name]
    save_file({name: obj[name].contiguous() for name in names}, f, {"format": "pt"})


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save ``obj`` with ``torch.save``, or as safetensors, on the main process or on one process of each machine."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        written(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load``; by default only tensors, plain values and NumPy arrays are allowed in the file."""
    with torch.serialization.safe_globals(_NUMPY_GLOBALS):
        return torch.load(f, map_location=map_location, **kwargs)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's original module inside a prepared one, as :meth:`Accelerator.unwrap_model` does.

    Args:
        keep_fp32_wrapper: without it, a ``forward`` that a script replaced is the one again that it stored as ``_original_forward``.
        keep_torch_compile, recursive: without effect.
    """
    while isinstance(model, (DistributedDataParallel, DataParallel)) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    if not keep_fp32_wrapper and "_original_forward" in vars(model):
        model.forward = vars(model).pop("_original_forward")
    return model


def wait_for_everyone() -> None:
    """Wait until all processes have called this."""
    PartialState().wait_for_everyone()


def is_peft_model(model: Any) -> bool:
    """Whether the module inside a prepared one is a ``peft.PeftModel``."""
    kinds = type(extract_model_from_parallel(model)).__mro__
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in kinds)
