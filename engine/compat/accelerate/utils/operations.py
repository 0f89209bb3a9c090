"""Collectives and tree functions under Accelerate's names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.compat.accelerate.state import PartialState
from engine.distributed import collectives
from engine.utils.tree import batch_size as find_batch_size  # noqa: F401
from engine.utils.tree import leaves, map_tensors, move


class DistributedOperationException(ValueError):
    """The tensors of the ranks do not match in number, shape or dtype."""


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is."""


def _call(function: Callable[..., Any], tree: Any, *args: Any) -> Any:
    """Call the collective ``function``; in debug mode, first check that all ranks' tensors have the same shapes."""
    state = PartialState()
    if state.debug:
        shapes = collectives.gather_json(state.group, [list(tensor.shape) for tensor in leaves(tree)])
        if any(shape != shapes[0] for shape in shapes):
            message = f"{function.__name__}: the ranks' tensors have different shapes: {shapes}"
            raise DistributedOperationException(message)
    return function(state.group, tree, *args)


def gather(tensor: Any) -> Any:
    """Concatenate all ranks' tensors along dim 0 in the order of ranks; a collective."""
    return _call(collectives.gather, tensor)


def gather_object(object: Any) -> Any:
    """Concatenate all ranks' lists in the order of ranks; on one process, return the object itself."""
    parts = collectives.gather_object(PartialState().group, object)
    return object if len(parts) == 1 else [item for part in parts for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of rank ``from_process`` on all ranks; a collective."""
    return _call(collectives.broadcast, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list, in place, by those of rank ``from_process``; a collective."""
    object_list[:] = collectives.broadcast_object(PartialState().group, object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors over the ranks; see :meth:`engine.Engine.reduce`. ``"none"`` only multiplies by ``scale``."""
    if reduction == "none":
        return map_tensors(lambda value: value * scale, tensor)
    return _call(collectives.all_reduce, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad tensors with the value ``pad_index`` along ``dim`` to the largest size on any rank; a collective.

    Raises:
        DistributedOperationException: the ranks have different numbers of tensors, dtypes or numbers of dims.
    """
    if any(value.is_nested for value in leaves(tensor)):
        message = "pad_across_processes: nested tensors cannot be padded, and nothing here is; unbind them first"
        warnings.warn(message, CannotPadNestedTensorWarning, stacklevel=2)
        return tensor
    try:
        return collectives.pad_across_processes(PartialState().group, tensor, dim, pad_index, pad_first)
    except ValueError as error:
        raise DistributedOperationException(str(error)) from None


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move the tensors in a tree to a device, except those under ``skip_keys`` of a mapping. The copies are asynchronous where that is safe."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    moved = move(tensor, torch.device(device))
    if isinstance(tensor, Mapping) and skipped:
        moved = type(moved)({key: tensor[key] if key in skipped else moved[key] for key in moved})
    return moved


def recursively_apply(func: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy ``data`` with each tensor replaced by ``func(tensor, *args, **kwargs)``."""
    return map_tensors(lambda tensor: func(tensor, *args, **kwargs), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert tensors in half precision to fp32; other dtypes are unchanged."""
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda value: value.float() if value.dtype in half else value, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that tensors in half precision that it returns are fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in a tree, or ``None``."""
    return next((tensor.device for tensor in leaves(data)), None)


def listify(data: Any) -> Any:
    """Copy a tree with each tensor replaced by a list of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def is_namedtuple(data: Any) -> bool:
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """Copy ``data`` with each tensor replaced by its slice ``tensor_slice``."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of trees of the same structure leaf by leaf. For a list with a single object that is no tree, return the object.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    first = data[0]
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([tree[key] for tree in data], dim) for key in first})  # type: ignore[call-arg]
    if isinstance(first, (tuple, list)):
        joined = (concatenate([tree[index] for tree in data], dim) for index in range(len(first)))
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim)
    if len(data) == 1:
        return first
    raise TypeError(f"concatenate takes a list of trees of tensors, got {type(first).__name__}")


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Any:
    """Return rank 0's tensor on the device of each rank; a collective."""
    state = PartialState()
    return move(collectives.broadcast_object(state.group, tensor), state.device)
