"""Whole tensors of other libraries' safetensors files, read as a strategy holds them: each rank reads its own shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from engine.checkpoint.files import DamagedCheckpoint, is_entry, read_json
from engine.checkpoint.tensors import Stored, TensorFiles


class SavedWeights:
    """The tensors of a folder, in ``model.safetensors`` or in the files that ``model.safetensors.index.json`` names.

    Raises:
        FileNotFoundError: there are none.
        ValueError, DamagedCheckpoint: they cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._files = TensorFiles(folder, _files(folder))  # the folder may hold other files, such as an adapter's
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{error.filename} is missing") from error
        self.stored: Mapping[str, Stored] = self._files.stored

    def read_into(self, targets: Mapping[str, Any]) -> None:
        """Fill parameters by their names in the files: whole ones, or this rank's shards under FSDP, tensor parallel and ZeRO-3. Not a collective.

        Raises:
            ValueError: a name is missing, or has another shape; nothing was read.
        """
        for name, target in targets.items():
            if name not in self.stored or self.stored[name].shape != shape_of(target):
                there = list(self.stored[name].shape) if name in self.stored else "not there"
                raise ValueError(f"{self.folder}: {name!r} is {there}, and {list(shape_of(target))} was requested")
        self._files.read_into({name: target for name, target in targets.items() if not hasattr(target, "ds_id")})
        for name, target in targets.items():
            if hasattr(target, "ds_id"):
                self._read_flat(name, target)

    @torch.no_grad()
    def _read_flat(self, name: str, parameter: Any) -> None:
        """Fill a rank's shard of a parameter that ZeRO-3 has flattened: only the rows that it is in are read."""
        shape = shape_of(parameter)
        low, high = _flat_range(parameter)
        width = math.prod(shape[1:])
        if high > low:
            first, last = low // width, -(-high // width)
            rows = self._files.rows(name, first, last) if shape else self._files.whole([name])[name]
            parameter.ds_tensor[: high - low].copy_(rows.flatten()[low - first * width : high - first * width])


def has_values(parameter: Any) -> bool:
    """Whether a parameter that was just made has its values: a strategy that shards may build models without."""
    return not parameter.is_meta and not hasattr(parameter, "ds_id")


def builds_without_values() -> bool:
    """Whether modules that are made now get parameters without values: inside ``configure_model`` under some strategies."""
    return not has_values(nn.Linear(1, 1, bias=False).weight)


def shape_of(parameter: Any) -> torch.Size:
    """The shape of the whole parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def fill(parameter: Any, value: Tensor) -> None:
    """Set this rank's part of a parameter to that of a whole ``value``, which is the same on all ranks."""
    if hasattr(parameter, "ds_id"):
        low, high = _flat_range(parameter)
        parameter.ds_tensor[: high - low].copy_(value.flatten()[low:high])
    elif hasattr(parameter, "placements"):
        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)


def _flat_range(parameter: Any) -> tuple[int, int]:
    """Where this rank's shard lies in the flattened parameter."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
    return min(rank * size, parameter.ds_numel), min((rank + 1) * size, parameter.ds_numel)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_json(index)
        known = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(known, dict) or not all(map(is_entry, known.values())):
            raise DamagedCheckpoint(f"{index} has no weight_map with names of files in its folder")
        names = sorted(set(known.values()))
        return [folder / name for name in names]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} has no model.safetensors: save it with save_pretrained, which writes safetensors"
        )
    return [folder / "model.safetensors"]
