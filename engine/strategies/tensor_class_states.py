"""Conversion of optimizer states that are tensor subclasses, such as torchao's 8-bit states, to plain tensors and back."""

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


def flat(entry: Any) -> Any:
    """A parameter's optimizer state in which each tensor of ``CLASSES`` is a dict of its inner tensors and numbers.

    Raises:
        ValueError: a tensor of these classes is sharded.
    """
    if not isinstance(entry, dict):
        return entry
    return {
        key: _flat(key, value) if type(value) is not Tensor and isinstance(value, Tensor) else value
        for key, value in entry.items()
    }


def _flat(key: str, value: Any) -> Any:
    name = type(value).__name__
    if name not in CLASSES or type(value).__module__ != CLASSES[name]:
        shard = value.to_local() if hasattr(value, "to_local") else None
        if type(shard).__name__ in CLASSES:
            raise ValueError(f"{key!r} of an optimizer's state is a sharded {type(shard).__name__}: {SHARDED}")
        return value
    parts, context = value.__tensor_flatten__()
    return {
        MADE_OF: name,
        **{part: getattr(value, part) for part in parts},
        "context": [_plain(entry) for entry in context],
    }


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
    if name not in CLASSES:
        raise ValueError(f"a checkpoint has an optimizer's state of class {name!r}; possible: {', '.join(CLASSES)}")
    cls: Any = getattr(import_module(CLASSES[name]), name)
    context = [getattr(torch, entry["dtype"]) if isinstance(entry, dict) else entry for entry in parts["context"]]
    tensors = {key: value for key, value in parts.items() if isinstance(value, Tensor)}
    tensor: Tensor = cls.__tensor_unflatten__(tensors, context)
    return tensor


def unflat(entry: Any) -> Any:
    """The inverse of :func:`flat`."""
    if not isinstance(entry, dict):
        return entry
    return {
        key: _unflat(value) if isinstance(value, dict) and MADE_OF in value else value for key, value in entry.items()
    }
