"""Collectives and tree functions under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.compat.accelerate.state import PartialState
from engine.distributed import collectives
from engine.utils.tree import batch_size as find_batch_size  # noqa: F401
from engine.utils.tree import leaves, map_tensors, move


class DistributedOperationException(ValueError):
    """The ranks' tensors do not fit together."""


def _call(function: Callable[..., Any], tree: Any, *args: Any) -> Any:
    state = PartialState()
    if state.debug:
        shapes = collectives.gather_json(state.group, [list(tensor.shape) for tensor in leaves(tree)])
        if any(shape != shapes[0] for shape in shapes):
            message = f"{function.__name__}: the ranks' tensors have different shapes: {shapes}"
            raise DistributedOperationException(message)
    return function(state.group, tree, *args)


def gather(tensor: Any) -> Any:
    """All ranks' tensors, concatenated along dim 0 in the order of ranks; a collective."""
    return _call(collectives.gather, tensor)


def gather_object(object: Any) -> Any:
    """The items of every rank's list, in the order of ranks; on one process the object itself."""
    parts = collectives.gather_object(PartialState().group, object)
    return object if len(parts) == 1 else [item for part in parts for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of rank ``from_process``, on all ranks; a collective."""
    return _call(collectives.broadcast, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by the ones of rank ``from_process``, in place; a collective."""
    object_list[:] = collectives.broadcast_object(PartialState().group, object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors over the ranks; see :meth:`engine.Engine.reduce`. ``"none"``: unchanged but for ``scale``."""
    if reduction == "none":
        return map_tensors(lambda value: value * scale, tensor)
    return _call(collectives.all_reduce, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors padded with ``pad_index`` along ``dim`` to the largest size of any rank; a collective.

    Raises:
        DistributedOperationException: the ranks have different numbers of tensors, dtypes or numbers of dims.
    """
    try:
        return collectives.pad_across_processes(PartialState().group, tensor, dim, pad_index, pad_first)
    except ValueError as error:
        raise DistributedOperationException(str(error)) from None


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """The tensors in a tree on a device, except under ``skip_keys`` of a mapping. Where the host can continue, it does not wait."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    moved = move(tensor, torch.device(device))
    if isinstance(tensor, Mapping) and skipped:
        moved = type(moved)({key: tensor[key] if key in skipped else moved[key] for key in moved})
    return moved


def recursively_apply(func: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """``data`` with ``func(tensor, *args, **kwargs)`` in the place of each tensor."""
    return map_tensors(lambda tensor: func(tensor, *args, **kwargs), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Tensors in half precision as fp32; other dtypes are unchanged."""
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda value: value.float() if value.dtype in half else value, tensor)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """``data`` with the slice ``tensor_slice`` of each tensor."""
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """The tensors of a list of trees of one shape, concatenated leaf by leaf; a list of one other object: this object.

    Raises:
        TypeError: other objects than tensors.
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
    """Rank 0's tensor on the devices of all ranks; a collective."""
    state = PartialState()
    return move(collectives.broadcast_object(state.group, tensor), state.device)
