"""Functions of nested batches: map over their tensors, move them, count their samples."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict, UserList, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

ReplaceObject = Callable[[Any], Any]
_PLAIN = frozenset((int, float, str, bool, bytes, type(None)))
_UNCHANGED: dict[torch.dtype, torch.dtype] = {}
_WAITS = ("cpu", "mps")
"""Devices to which copies must block: on the CPU the host could read data before it has arrived, and MPS reads memory that the host has
freed (https://github.com/pytorch/pytorch/issues/189690)."""


@cache
def formats(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """The dtype that a tensor gets, by its dtype, when floating point numbers are converted to ``dtype``. Others (integers, fp8) stay.

    Complex numbers stay complex, with parts as wide as ``dtype`` but at least fp32, because few operations support narrower ones.
    """
    real = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    complex_ = torch.complex128 if dtype == torch.float64 else torch.complex64
    return dict.fromkeys(real, dtype) | dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), complex_)


def map_tensors(fn: Callable[[Tensor], Any], tree: Any, replace_object: ReplaceObject | None = None) -> Any:
    """Return ``tree`` with ``fn`` applied to each tensor; containers keep their types and their other contents.

    Containers: dict, list, tuple and their subclasses, other mappings and sequences, dataclasses and attrs classes, frozen ones too.
    Other objects stay as they are.

    Args:
        replace_object: a function to call with each object that is not a tensor, a plain dict, list or tuple, or a plain value. Its result
            takes the object's place; ``NotImplemented`` means to look inside the object.

    Raises:
        TypeError: a container cannot be created again from its changed items.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    kind = type(tree)
    # The usual containers of collate functions are handled here: a general tree walk costs 10 us per batch, this one 1 us.
    if kind is list:
        return [map_tensors(fn, item, replace_object) for item in tree]
    if kind is tuple:
        return tuple(map_tensors(fn, item, replace_object) for item in tree)
    if kind is dict:
        return {key: map_tensors(fn, item, replace_object) for key, item in tree.items()}
    if kind in _PLAIN:
        return tree
    if replace_object is not None and (replacement := replace_object(tree)) is not NotImplemented:
        return replacement
    return _mapped(lambda item: map_tensors(fn, item, replace_object), tree, kind)


def _mapped(visit: Callable[[Any], Any], tree: Any, kind: Any) -> Any:
    """A container of any other kind with its items replaced by the results of ``visit``; the same object if no item changes."""
    parts = _parts(tree, kind)
    items = {key: visit(item) for key, item in parts.items()}
    if all(items[key] is item for key, item in parts.items()):
        return tree
    if isinstance(tree, (dict, UserDict, list, UserList, deque)):  # a copy also has the attributes of a subclass
        copied: Any = copy.copy(tree)
        for key, item in items.items():
            copied[key] = item
        return copied
    try:
        if isinstance(tree, Mapping):
            return kind(items)
        if isinstance(tree, Sequence):
            return kind(*items.values()) if hasattr(kind, "_fields") else kind(list(items.values()))
    except TypeError as error:
        raise TypeError(
            f"a batch holds a {kind.__name__}, which cannot be made again from its items ({error}): give the class a method "
            "to(device), or use a dict or a list"
        ) from error
    copied = copy.copy(tree)
    for name, item in items.items():
        object.__setattr__(copied, name, item)  # frozen classes, Loss among them, refuse other ways
    return copied


def _parts(tree: Any, kind: type) -> dict[Any, Any]:
    """A container's items by key, index or field name; empty for objects that are not containers."""
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if isinstance(tree, (Sequence, deque)):
        return {} if isinstance(tree, (str, bytes, bytearray, memoryview, range)) else dict(enumerate(tree))
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ())
    return {field.name: getattr(tree, field.name) for field in fields if hasattr(tree, field.name)}


def parts_of(tree: Any) -> dict[Any, Any]:
    """The items of a container of :func:`map_tensors` by key, index or field name; empty for other objects."""
    return _parts(tree, type(tree))


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of ``tree``, in the order of :func:`map_tensors`."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return tensors


def move(tree: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return ``tree`` with its tensors on ``device``; with ``dtype``, floating point and complex ones are converted as :func:`formats` says.

    The host does not wait for copies to a device (``non_blocking``). Objects with a method ``to(device)``, also inside containers
    (``PackedSequence``, a Hugging Face ``BatchEncoding``, a PyG ``Data``), are moved by that method, with ``non_blocking`` if it accepts that.
    An object that can be copied (``__copy__``) is copied first, because some move in place, and a list of batches would fill the device.
    """

    dtypes = _UNCHANGED if dtype is None else formats(dtype)
    waits = device.type in _WAITS

    def to(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtypes.get(tensor.dtype), non_blocking=not waits)

    def move_object(item: Any) -> Any:
        if not _moves_itself(item):
            return NotImplemented
        kind: Any = type(item)
        item_to_move = copy.copy(item) if hasattr(item, "__copy__") else item
        options = {"non_blocking": True} if not waits and _takes_non_blocking(kind) else {}
        moved = item_to_move.to(device, **options)
        return cast(item_to_move if moved is None else moved, dtype)  # some classes move in place and return nothing

    return map_tensors(to, tree, move_object)


def on_host(tree: Any) -> Any:
    """Return ``tree`` with its tensors on the CPU, without graphs; a tensor that occurs several times stays shared. Waits for the device."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu()
        return copies[id(tensor)]

    return map_tensors(copied, tree)


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with its tensors converted to ``dtype`` as :func:`formats` says; ``None``: unchanged. Objects other than containers stay."""
    if dtype is None:
        return tree
    dtypes = formats(dtype)
    return map_tensors(lambda tensor: tensor.to(dtypes.get(tensor.dtype)), tree)


def _moves_itself(item: Any) -> bool:
    return callable(getattr(item, "to", None)) and not isinstance(item, type)


@cache
def _takes_non_blocking(kind: Any) -> bool:
    """Whether the method ``to`` of a class accepts ``non_blocking``."""
    try:
        parameters = inspect.signature(kind.to).parameters
    except (AttributeError, TypeError, ValueError):  # forwarded by __getattr__, or written in C
        return False
    return "non_blocking" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (``DTensor``) into the full one on each rank, with its graph; a collective. Return other tensors unchanged."""
    if type(tensor) is Tensor:
        return tensor
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def batch_size(tree: Any) -> int | None:
    """The number of samples in ``tree``: the first dimension of its first tensor, the number of sequences in a ``PackedSequence``, or an
    object's ``batch_size`` (PyG's ``Batch``, a ``TensorDict``); ``None`` if nothing says it."""
    if type(tree) in (tuple, list) and tree and type(tree[0]) is Tensor and tree[0].ndim:
        return tree[0].shape[0]  # the usual case first: this may be called in every step
    if isinstance(tree, Tensor):
        return tree.size(0) if tree.ndim else None
    if isinstance(tree, PackedSequence):
        return int(tree.batch_sizes[0])  # always on the host, so this does not wait for a device
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return next((size_of_item for item in tree if (size_of_item := batch_size(item)) is not None), None)
    parts = _parts(tree, type(tree))
    if parts:
        return batch_size(list(parts.values()))
    size = getattr(tree, "batch_size", None)
    if isinstance(size, tuple):
        size = size[0] if size else None
    return size if isinstance(size, int) else None
