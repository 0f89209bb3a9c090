"""Sharded tensors (``DTensor``): local shards, norms, gathering and scattering."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from engine.distributed.group import Group
from engine.utils.parameters import mesh_axes
from engine.utils.torch_private import is_strided_shard
from engine.utils.tree import map_tensors


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards, which share memory with the tensors. torch's foreach functions accept them, but no mix of DTensors and plain ones."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@torch.no_grad()
def to_parameter_layout(parameter: Any) -> None:
    """Bring a gradient into its parameter's layout. Autograd leaves it in the layout that backward produced: perhaps not summed over ranks
    yet, or whole where the parameter is sharded."""
    grad = parameter.grad
    if grad is not None and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def shard_count(tensor: Tensor) -> int:
    """The number of ranks that a tensor is sharded over; 1 for a whole one."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard() or is_strided_shard(placement):
            count *= tensor.device_mesh.size(axis)
    return count


def sharded_axes(tensors: Iterable[Tensor]) -> set[str]:
    """The names of the mesh's axes along which every one of the tensors is sharded: ranks that differ there have no element in common."""
    axes: set[str] | None = None
    for tensor in tensors:
        names: set[str] = set()
        if isinstance(tensor, DTensor):
            pairs = zip(mesh_axes(tensor), tensor.placements, strict=False)
            names = {name for name, placement in pairs if placement.is_shard() or is_strided_shard(placement)}
        axes = names if axes is None else axes & names
    return axes or set()


def is_uneven(tensor: Tensor) -> bool:
    """Whether the shards of a tensor have different sizes on different ranks."""
    if not isinstance(tensor, DTensor):
        return False
    parts: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard() or is_strided_shard(placement):
            dim = placement.dim  # type: ignore[attr-defined]
            parts[dim] = parts.get(dim, 1) * tensor.device_mesh.size(axis)
    return any(tensor.shape[dim] % count for dim, count in parts.items())


@torch.no_grad()
def full_state(group: Group, tree: Any, keep: bool) -> Any:
    """Return ``tree`` with full tensors on the CPU. Every rank calls this; ranks without ``keep`` get ``{}``. Tensors are gathered one by one.

    A tensor that occurs several times in ``tree`` is gathered once, and stays shared.
    """
    gathered: dict[int, Tensor | None] = {}

    def gather(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        if id(tensor) not in gathered:
            # Offloaded shards are on the CPU, and are communicated through the mesh's device.
            full: Any = tensor.detach().to(group.device)
            placements = list(full.placements)
            for axis, placement in enumerate(placements):
                if is_strided_shard(placement):  # this axis was sharded last, so it is gathered first, by itself
                    placements[axis] = Replicate()
                    full = full.redistribute(placements=placements)
            full = full.full_tensor()
            gathered[id(tensor)] = full.cpu() if keep else None
        return gathered[id(tensor)]

    full_tree = map_tensors(gather, tree)
    return full_tree if keep else {}


@torch.no_grad()
def shard_like(value: Any, like: Any) -> Any:
    """Shard ``value``, a full tensor on every rank, in the layout of ``like``; return it unchanged if shapes differ or ``like`` is whole."""
    if (
        not isinstance(like, DTensor)
        or not isinstance(value, Tensor)
        or isinstance(value, DTensor)
        or value.shape != like.shape
    ):
        return value
    mesh, placements = like.device_mesh, like.placements
    axes = list(range(len(placements)))
    if any(is_strided_shard(p) for p in placements):
        axes.reverse()  # shard by the inner axes first, as fully_shard does after tensor parallel
    shard = value.to(like.device)
    for axis in axes:
        placement: Any = placements[axis]
        if placement.is_shard() or is_strided_shard(placement):
            chunks, index = shard.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            shard = chunks[index] if index < len(chunks) else shard.narrow(placement.dim, 0, 0)
    shard = shard.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, which may be sharded over several ranks."""
    return isinstance(tensor, DTensor)
