"""Reads unsharded tensors from safetensors files into sharded parameters: each rank reads only its own shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from engine.checkpoint.files import DamagedCheckpoint, is_entry, read_json
from engine.checkpoint.tensor_files import Stored, TensorFiles
from engine.strategies import recorded_values
from engine.strategies.base import Strategy


class SavedWeights:
    """The tensors in a folder's ``model.safetensors``, or in the files that its ``model.safetensors.index.json`` lists.

    Raises:
        FileNotFoundError: the folder has neither of these files.
        ValueError, DamagedCheckpoint: the files are invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._files = TensorFiles(folder, _files(folder))  # the folder may hold other files, such as an adapter's
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{error.filename} is missing") from error
        self.stored: Mapping[str, Stored] = self._files.stored

    def read_into(self, targets: Mapping[str, Tensor], strategy: Strategy) -> None:
        """Fill ``targets`` (name in the files -> parameter), or this rank's shards of them under a strategy that shards. Not a collective.

        Raises:
            ValueError: a tensor is missing, or has another shape; nothing was read.
        """
        shapes = {name: strategy.whole_shape(target) for name, target in targets.items()}
        for name, shape in shapes.items():
            if name not in self.stored or self.stored[name].shape != shape:
                saved_shape = list(self.stored[name].shape) if name in self.stored else "not there"
                raise ValueError(f"{self.folder}: {name!r} is {saved_shape}, and {list(shape)} was requested")
        flat = {name: span for name, target in targets.items() if (span := strategy.flat_range(target)) is not None}
        self._files.read_into({name: target for name, target in targets.items() if name not in flat})
        for name, (low, high) in flat.items():
            if high > low:
                _fill_flat(targets[name], self._elements(name, shapes[name], low, high), strategy)

    def _elements(self, name: str, shape: torch.Size, low: int, high: int) -> Tensor:
        """Read the elements from ``low`` up to ``high`` of a flattened tensor, reading only the rows that contain them."""
        width = math.prod(shape[1:])
        first, last = low // width, -(-high // width)
        rows = self._files.rows(name, first, last) if shape else self._files.whole_tensors([name])[name]
        return rows.flatten()[low - first * width : high - first * width]


def builds_without_values() -> bool:
    """Whether modules created now get parameters without values, as inside ``configure_model`` under some strategies that shard."""
    weight = nn.Linear(1, 1, bias=False).weight
    return recorded_values.has_no_memory(weight) or not weight.numel()


@torch.no_grad()
def fill(parameter: Any, value: Tensor, strategy: Strategy) -> None:
    """Set this rank's part of a parameter from the full ``value``, which all ranks have."""
    span = strategy.flat_range(parameter)
    if span is not None:
        _fill_flat(parameter, value.flatten()[slice(*span)], strategy)
    elif hasattr(parameter, "placements"):
        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)


@torch.no_grad()
def _fill_flat(parameter: Tensor, elements: Tensor, strategy: Strategy) -> None:
    strategy.local([parameter])[0][: len(elements)].copy_(elements)


def _files(folder: Path) -> list[Path]:
    """The paths of the model's safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(map(is_entry, weight_map.values())):
            raise DamagedCheckpoint(f"{index} has no weight_map with names of files in its folder")
        names = sorted(set(weight_map.values()))
        return [folder / name for name in names]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} has no model.safetensors: save it with save_pretrained, which writes safetensors"
        )
    return [folder / "model.safetensors"]
