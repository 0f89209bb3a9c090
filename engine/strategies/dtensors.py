"""Sharded tensors (``DTensor``): local shards, norms, gathering and scattering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from engine.distributed.collectives import all_reduce
from engine.distributed.group import Group
from engine.utils import accelerator
from engine.utils.torch_private import is_strided_shard
from engine.utils.tree import map_tensors


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards; they share memory with the tensors. torch's foreach functions accept these, but no mix of both kinds."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@torch.no_grad()
def to_parameter_layout(parameter: Any) -> None:
    """Bring a gradient into its parameter's layout. Autograd leaves it as backward made it: not summed over ranks yet, or whole where the
    parameter is sharded."""
    grad = parameter.grad
    if grad is not None and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def shard_count(tensor: Tensor) -> int:
    """How many ranks a tensor is sharded over."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard() or is_strided_shard(placement):
            count *= tensor.device_mesh.size(axis)
    return count


def norm(
    group: Group, tensors: Sequence[Tensor], norm_type: float, holders: Callable[[Tensor], int], device: torch.device
) -> Tensor:
    """The norm of all ``tensors`` together. Shape ``()``; otherwise as :func:`norms`."""
    return norms(group, [tensors], norm_type, holders, device)[0]


@torch.no_grad()
def norms(
    group: Group,
    lists: Sequence[Sequence[Tensor]],
    norm_type: float,
    holders: Callable[[Tensor], int],
    device: torch.device,
) -> Tensor:
    """The norm of each list over all ranks, by one collective. Shape ``[len(lists)]``, at least fp32.

    Args:
        lists: of sharded tensors and whole ones; an empty one if other ranks have these.
        holders: how many ranks have a shard of a tensor, including copies: each shard is on ``holders(t) / shard_count(t)`` of them.
        device: of the result when this rank has no tensor.
    """
    dtype, largest = torch.float32, norm_type == float("inf")
    totals = []
    for tensors in lists:
        by_copies: dict[float, list[Tensor]] = {}
        for tensor in tensors:
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if part.numel():
                dtype = torch.promote_types(dtype, part.dtype.to_real())
                by_copies.setdefault(holders(tensor) / shard_count(tensor), []).append(part)
        total = torch.zeros((), dtype=accelerator.wide(device), device=device)
        for copies, parts in by_copies.items():
            part_norm = torch.nn.utils.get_total_norm(parts, norm_type).to(total)
            total = torch.maximum(total, part_norm) if largest else total + part_norm**norm_type / copies
        totals.append(total)
    norms_of_lists: Tensor = all_reduce(group, torch.stack(totals), "max" if largest else "sum")
    return norms_of_lists.to(dtype) if largest else (norms_of_lists ** (1.0 / norm_type)).to(dtype)


@torch.no_grad()
def full_state(group: Group, tree: Any, keep: bool) -> Any:
    """``tree`` with full tensors on the CPU; every rank calls this, those without ``keep`` get ``{}``. One tensor at a time is gathered.

    A tensor that occurs several times is gathered once, and stays shared.
    """
    gathered: dict[int, Tensor | None] = {}

    def gather(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        if id(tensor) not in gathered:
            # Offloaded shards are on the CPU, and are communicated through the mesh's device.
            local: Any = tensor.detach().to(group.device)
            placements = list(local.placements)
            for axis, placement in enumerate(placements):
                if is_strided_shard(placement):  # sharded last: gathered first, separately
                    placements[axis] = Replicate()
                    local = local.redistribute(placements=placements)
            local = local.full_tensor()
            gathered[id(tensor)] = local.cpu() if keep else None
        return gathered[id(tensor)]

    full_tree = map_tensors(gather, tree)
    return full_tree if keep else {}


@torch.no_grad()
def shard_like(value: Any, like: Any) -> Any:
    """Shard the full tensor ``value``, which every rank has, like ``like``; unchanged if the shape differs or ``like`` is not sharded."""
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
    mine = value.to(like.device)
    for axis in axes:
        placement: Any = placements[axis]
        if placement.is_shard() or is_strided_shard(placement):
            cut, index = mine.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            mine = cut[index] if index < len(cut) else mine.narrow(placement.dim, 0, 0)
    mine = mine.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor lies on several ranks, as a ``DTensor``."""
    return isinstance(tensor, DTensor)
