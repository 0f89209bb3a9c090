"""The device mesh: the processes of a job as a grid with named axes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from engine.distributed.group import Group


def degrees(sizes: Mapping[str, int], world_size: int, who: str) -> dict[str, int]:
    """The sizes of the mesh's axes; one of them may be -1, and is inferred from ``world_size`` (0: not known yet).

    Raises:
        ValueError: a size is below 1, several are -1, or their product is not ``world_size``; the message starts with ``who``.
    """
    sizes_text = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"{who}({name}={size!r}) must be an int of at least 1, or -1 for all remaining ranks")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"{who}({sizes_text}): only one axis can be -1 (inferred); {' and '.join(open_axes)} are")
    if not world_size:
        return dict(sizes)
    product = prod(size for size in sizes.values() if size != -1)
    inferred, remainder = divmod(world_size, product)
    if remainder or (not open_axes and inferred != 1):
        required = f"a multiple of {product}" if open_axes else f"{product}"
        raise ValueError(
            f"{who}({sizes_text}) needs {required} processes, this job has {world_size}: "
            "the product of the sizes must equal it; one may be -1 (inferred)"
        )
    return {name: inferred if size == -1 else size for name, size in sizes.items()}


def make_mesh(group: Group, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks, in row-major order. A collective; a job has one mesh per tuple of sizes.

    The mesh has only axes with more than one rank, because a process group of one rank would have nothing to do. ``dp_shard`` is kept beside
    ``dp_replicate`` in any case, because ``fully_shard`` replicates only on a mesh of two axes.
    """
    needed = "dp_shard" if sizes.get("dp_replicate", 1) > 1 or group.world_size == 1 else None
    axes = {name: size for name, size in sizes.items() if size > 1 or name == needed}
    kind, names, shape = group.device.type, tuple(axes), tuple(axes.values())
    return group.made_once(("mesh", kind, names, shape), lambda: _mesh(group, names, shape))


def _mesh(group: Group, names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(group.world_size).reshape(shape)
    axes = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(shape)]
    groups: Any = [group.part_for_device(axis) for axis in axes]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0], group.device.type, ranks, mesh_dim_names=names
    )


def data_group(group: Group, sizes: Mapping[str, int]) -> Group:
    """The group of ranks that see different data: this rank and those that differ from it in the ``dp_`` axes only. A collective."""
    order = [i for i, name in enumerate(sizes) if not name.startswith("dp_")]
    moved = torch.arange(group.world_size).reshape(tuple(sizes.values())).movedim(order, list(range(len(order))))
    rows = moved.reshape(-1, prod(size for name, size in sizes.items() if name.startswith("dp_"))).tolist()
    return group if len(rows) == 1 else group.part(rows)
