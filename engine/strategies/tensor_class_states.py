"""Conversion of optimizer states that are tensor subclasses, such as torchao's 8-bit states, or transposed, to plain tensors and back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MADE_OF = "tensor_class"
CLASSES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""Classes that can be restored from a checkpoint, and their modules; nothing else is imported because a file names it."""


def flat(entry: Any, parameter: Any = None) -> Any:
    """A parameter's optimizer state in which each tensor of ``CLASSES`` is a dict of its inner tensors and numbers.

    So is a tensor whose dims are not in the order of its memory, as a QR decomposition returns it, because products of matrices round differently
    in another order.

    Args:
        entry: the state, or a dict or list in it.
        parameter: the parameter; tensors that are laid out like it stay as they are. ``None``: all dense tensors stay.

    Raises:
        ValueError: a tensor of these classes is sharded.
    """
    if isinstance(entry, dict):
        return {key: _flat(str(key), value, parameter) for key, value in entry.items()}
    if type(entry) in (list, tuple):
        return type(entry)(_flat(str(number), value, parameter) for number, value in enumerate(entry))
    return entry


def _flat(key: str, value: Any, parameter: Any) -> Any:
    if not isinstance(value, Tensor):
        return flat(value, parameter)
    if type(value) is Tensor:
        return value if parameter is None else _in_order(value, parameter)
    name = type(value).__name__
    if name not in CLASSES or type(value).__module__ != CLASSES[name]:
        shard = value.to_local() if hasattr(value, "to_local") else None
        if type(shard).__name__ in CLASSES:
            raise ValueError(f"{key!r} of an optimizer's state is a sharded {type(shard).__name__}: {SHARDED}")
        return value
    wrapper: Any = value
    parts, context = wrapper.__tensor_flatten__()
    return {
        MADE_OF: name,
        **{part: getattr(value, part) for part in parts},
        "context": [_plain(entry) for entry in context],
    }


_PERMUTED = "permuted"
"""The name under :data:`MADE_OF` of a tensor whose dims are stored in the order of its memory."""


def _in_order(value: Tensor, parameter: Tensor) -> Any:
    """The tensor, or a dict with it and the order of its dims in memory, if they have another one and the parameter has not the same."""
    if value.is_contiguous() or (value.shape == parameter.shape and value.stride() == parameter.stride()):
        return value
    strides = value.stride()
    dims = sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim))
    in_order = value.permute(dims)
    return {MADE_OF: _PERMUTED, "tensor": in_order, "context": dims} if in_order.is_contiguous() else value


SHARDED = "its blocks depend on the world size; use strategy='ddp', or an optimizer whose states are plain tensors"
"""The end of messages about sharded states of these classes."""


def _plain(value: Any) -> Any:
    return (
        {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.dtype)
        else tuple(value)
        if isinstance(value, tuple)
        else value
    )


def _unflat(parts: dict[str, Any]) -> Tensor:
    name = parts[MADE_OF]
    if name == _PERMUTED:
        dims = parts["context"]
        in_order: Tensor = parts["tensor"].permute([dims.index(dim) for dim in range(len(dims))])
        return in_order
    if name not in CLASSES:
        raise ValueError(f"a checkpoint has an optimizer's state of class {name!r}; possible: {', '.join(CLASSES)}")
    cls: Any = getattr(import_module(CLASSES[name]), name)
    context = [getattr(torch, entry["dtype"]) if isinstance(entry, dict) else entry for entry in parts["context"]]
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
    tensor: Tensor = cls.__tensor_unflatten__(tensors, context)
    return tensor


def unflat(entry: Any) -> Any:
    """The inverse of :func:`flat`."""
    if isinstance(entry, dict):
        return _unflat(entry) if MADE_OF in entry else {key: unflat(value) for key, value in entry.items()}
    return type(entry)(map(unflat, entry)) if type(entry) in (list, tuple) else entry
