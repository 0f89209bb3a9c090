"""A model's state as tensors, each once, and a JSON tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.checkpoint.json_tree import pack, same_memory
from engine.checkpoint.tensors import storable


def split(model: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a model's state, each once, and a JSON value: which names share one, and entries that are not tensors.

    Raises:
        TypeError: a value cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            extra[name] = value
            continue
        if not storable(value):
            raise TypeError(
                f"the model's {name!r} ({value.dtype} on {value.device}) cannot be stored: convert it to a dense tensor of a type that "
                "safetensors has"
            )
        known = first.setdefault(same_memory(value), name)
        if known == name:
            tensors[name] = value
        else:
            aliases[name] = known
    packed, found = pack(extra)
    if found:
        raise TypeError(f"get_extra_state returned tensors ({sorted(found)[:3]}): register them as buffers")
    return tensors, {"aliases": aliases, "extra": packed}


def _merged(rows: list[Any]) -> Any:
    """Merge the JSON trees of ranks with different names; for the same name, rank 0's value."""
    if len(rows) == 1 or not all(isinstance(row, dict) for row in rows):
        return rows[0]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _merged([row[name] for row in rows if name in row]) for name in names}
