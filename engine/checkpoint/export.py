"""Weights as others read them: one ``.safetensors`` file, or several with an index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.files import write_json
from engine.checkpoint.state import same_memory
from engine.checkpoint.tensors import storable, write_tensors

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(value: int | str) -> int:
    """``5_000_000_000`` or ``"5GB"``, ``"200MiB"``.

    Raises:
        ValueError: neither.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value), re.IGNORECASE)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"max_shard_size={value!r} is no size: give bytes, or text such as '5GB' or '200MiB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def export_tensors(state: Mapping[str, Any], directory: Path, *, max_shard_size: int | str = "5GB") -> list[Path]:
    """Write ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with ``model.safetensors.index.json``.

    Tied weights are written once, under their first name. What is no tensor is left out.

    Args:
        state: whole tensors by name.
        max_shard_size: of a file; a larger tensor has one of its own.

    Returns:
        The files with tensors.

    Raises:
        TypeError: a tensor that safetensors cannot hold.
        FileExistsError: such files are there already.
    """
    limit = size_in_bytes(max_shard_size)
    kept: dict[Any, str] = {}
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or kept.setdefault(same_memory(tensor), name) != name:
            continue
        if not storable(tensor):
            raise TypeError(f"{name!r} ({tensor.dtype} on {tensor.device}) cannot be written as safetensors: convert it to a dense tensor first")
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    directory.mkdir(parents=True, exist_ok=True)
    if there := sorted(path.name for path in directory.glob("model*.safetensors*")):
        raise FileExistsError(f"{directory} holds {there[0]} already: choose another directory, or remove it")
    if len(shards) == 1:
        write_tensors(directory / "model.safetensors", shards[0])
        return [directory / "model.safetensors"]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, tensors in zip(names, shards, strict=True):
        write_tensors(directory / file, tensors)
    total = sum(t.nbytes for tensors in shards for t in tensors.values())
    weights = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weights})
    return [directory / file for file in names]
