"""Trees of Python values and tensors as JSON and named tensors, and back. Nothing that is read can run code."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.checkpoint.tensor_files import known_format

if TYPE_CHECKING:  # manifests are read without torch
    from torch import Tensor

_TAG = "$"  # a value that JSON cannot express becomes {"$": kind, ...}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_NUMPY = frozenset(
    ("bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)), "float16", "float32", "float64")
)
_ARRAYS = _NUMPY | {"complex64"}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_POSSIBLE = (
    "possible are dict, list, tuple, set, int, float, str, bool, None, bytes, tensors, and numpy arrays and numbers"
)


def pack(tree: Any, is_sharded: Callable[[Tensor], bool] = lambda tensor: False) -> tuple[Any, dict[str, Tensor]]:
    """Split ``tree`` into a JSON value and its tensors.

    :func:`unpack` restores exact types: tuples, sets, bytes, keys of dicts that are not strings, infinite and NaN floats,
    numpy arrays and numbers, ``OrderedDict`` and ``Counter``. Parameters come back as plain tensors. A tensor that occurs
    several times is stored once, and comes back as one tensor.

    Args:
        is_sharded: whether a tensor is a sharded one; those are accepted besides plain ones.

    Returns:
        A value for ``json.dumps(..., allow_nan=False)``, and the tensors by name. They are detached but not copied:
        they stay on their device and change with the originals.

    Raises:
        TypeError: a value has an unsupported type; the message says where in the tree.
    """
    packer = _Packer(is_sharded)
    return packer.value(tree, ()), packer.tensors


def unpack(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Restore the tree that was given to :func:`pack`; its tensors are looked up in ``tensors`` by name.

    Raises:
        ValueError: ``value`` is not a result of :func:`pack`, or names a tensor that ``tensors`` lacks.
    """
    try:
        return _unpack(value, tensors)
    except (TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a packed tree: {type(error).__name__}: {error}") from error


_PLAIN = frozenset((type(None), bool, int, str))
"""The types of values that JSON has as they are."""


class _Packer:
    """Converts one tree to JSON, and collects its tensors by name."""

    def __init__(self, is_sharded: Callable[[Tensor], bool]) -> None:
        self.is_sharded = is_sharded
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def value(self, item: Any, path: tuple[Any, ...]) -> Any:
        kind = type(item)
        if item is None or kind in (bool, int, str):
            return item
        if kind is float:
            return item if math.isfinite(item) else {_TAG: "float", "value": str(item)}
        if kind is list:
            # Each checkpoint has the steps of all that are kept, which may be thousands.
            plain = _PLAIN.issuperset(map(type, item))
            return list(item) if plain else [self.value(element, (*path, i)) for i, element in enumerate(item)]
        if kind is dict:
            # Loops rather than a call for each key and plain value: settings have hundreds of them.
            for key in item:
                if type(key) is not str or key.startswith(_TAG):
                    return self._mapping(item, path)
            packed = {}
            for key, element in item.items():
                plain = element is None or type(element) in (bool, int, str)
                packed[key] = element if plain else self.value(element, (*path, key))
            return packed
        if kind in _MAPPINGS.values():
            return self._mapping(item, path)
        if kind in _SEQUENCES.values():
            return {_TAG: kind.__name__, "items": [self.value(element, (*path, i)) for i, element in enumerate(item)]}
        if kind is bytes:
            return {_TAG: "bytes", "base64": base64.b64encode(item).decode("ascii")}
        if (torch := sys.modules.get("torch")) and isinstance(item, torch.Tensor):
            return {_TAG: "tensor", "name": self._tensor(item, path)}
        if numpy := sys.modules.get("numpy"):  # numpy was never imported: the tree has no arrays
            if isinstance(item, numpy.generic) and item.dtype.name in _NUMPY:
                return {_TAG: "number", "dtype": item.dtype.name, "value": self.value(item.item(), path)}
            if kind is numpy.ndarray and item.dtype.name in _ARRAYS:
                return {_TAG: "array", "name": self._array(item, path)}
        raise _unpackable(item, path)

    def _mapping(self, item: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        kind = type(item)
        for key in item:
            if not _is_key(key):
                raise TypeError(f"{_where(path)} has a key of type {type(key).__name__}, {key!r}: {_KEYS}")
        pairs = [[self.value(key, path), self.value(element, (*path, key))] for key, element in item.items()]
        return {_TAG: kind.__name__, "items": pairs}

    def _tensor(self, item: Tensor, path: tuple[Any, ...]) -> str:
        """Collect a tensor, and return its name; tensors that share memory get one name."""
        import torch

        plain = type(item) in (torch.Tensor, torch.nn.Parameter) or self.is_sharded(item)
        if not plain or item.layout != torch.strided or item.is_quantized:
            raise TypeError(
                f"{_where(path)} is a tensor of a special kind ({type(item).__name__}, {item.layout}): make it a dense one"
            )
        if not known_format(item.dtype) or item.is_meta:
            raise TypeError(
                f"{_where(path)} is a tensor of {item.dtype} on {item.device}, which cannot be stored: convert it"
            )
        memory = same_memory(item)
        if memory not in self._names:
            self._names[memory] = self._name(path)
            self.tensors[self._names[memory]] = item.detach()
        return self._names[memory]

    def _array(self, item: Any, path: tuple[Any, ...]) -> str:
        import torch

        name = self._name(path)
        # A copy, since torch accepts neither negative strides nor foreign byte order, and warns about read-only memory.
        self.tensors[name] = torch.from_numpy(item.astype(item.dtype.newbyteorder("="), order="C", copy=True))
        return name

    def _name(self, path: tuple[Any, ...]) -> str:
        # Safetensors needs valid UTF-8 and reserves "__metadata__".
        name = ".".join(map(str, path)).encode("utf-8", "replace").decode("utf-8") or "value"
        while name in self.tensors or name == "__metadata__":
            name += "'"
        return name


_KEYS = "keys may be str, int, float, bool, None, bytes, or tuples of them"


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (str, int, float, bool, bytes)


def same_memory(tensor: Tensor) -> Any:
    """A key that is equal for tensors that are the same view of the same memory, such as tied weights."""
    import torch

    if not tensor.numel() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _where(path: tuple[Any, ...]) -> str:
    return "the state" + "".join(f"[{key!r}]" for key in path)


def _unpackable(item: Any, path: tuple[Any, ...]) -> TypeError:
    """Create the error for a value that cannot be packed, with advice."""
    kind = type(item)
    simple = next((base for base in (bool, int, float, str, bytes, tuple, list, dict) if isinstance(item, base)), None)
    if simple is not None:
        fix = f"turn it into a plain {simple.__name__}"
    elif hasattr(item, "dtype"):
        fix = f"convert it ({item.dtype}) to a plain array of numbers"
    elif callable(getattr(item, "state_dict", None)):
        fix = "save its state_dict()"
    else:
        fix = "save its parts, and create it again when loading"
    return TypeError(
        f"{_where(path)} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: {fix}; {_POSSIBLE}"
    )


def _unpack(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _unpack(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_unpack(key, tensors): _unpack(item, tensors) for key, item in value["items"]})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_unpack(item, tensors) for item in value["items"])
    if kind == "float":
        return _FLOATS[value["value"]]
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        return tensors[value["name"]].numpy()
    if kind == "number" and value["dtype"] in _NUMPY:
        import numpy

        dtype: numpy.dtype[Any] = numpy.dtype(value["dtype"])
        number = _unpack(value["value"], tensors)
        if dtype.kind in "iu" and not numpy.iinfo(dtype).min <= number <= numpy.iinfo(dtype).max:
            raise OverflowError(f"{number} is out of the bounds of {dtype}")  # NumPy 1 would wrap it around
        return dtype.type(number)
    raise ValueError(f"not a packed tree: unknown kind {value!r}")
