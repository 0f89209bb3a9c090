"""Tensors of which each rank holds a part (``DTensor``): their own part, their norm, the whole of them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.group import Group
from engine.tree import map_tensors


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts; they share memory with the tensors. torch's foreach functions take these, but no mix of both kinds."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@torch.no_grad()
def norm(group: Group, tensors: Sequence[Tensor], norm_type: float, copies: int, device: torch.device) -> Tensor:
    """The norm over all ranks, by one collective of one number. Shape ``()``, at least fp32.

    Args:
        tensors: sharded ones, of which ``copies`` ranks hold the same part, and whole ones, which every rank holds.
        device: where the result is when this rank has no tensor.
    """
    dtype = torch.float32
    sums = {True: torch.zeros((), dtype=torch.float64, device=device), False: torch.zeros((), dtype=torch.float64, device=device)}
    largest = norm_type == float("inf")
    for sharded in (True, False):
        parts = [t for t in local(t for t in tensors if isinstance(t, DTensor) is sharded) if t.numel()]
        if parts:
            dtype = torch.promote_types(dtype, parts[0].dtype)
            norms = torch.nn.utils.get_total_norm(parts, norm_type).to(device, torch.float64)
            sums[sharded] = norms if largest else norms**norm_type
    if largest:
        found: Tensor = all_reduce(group, torch.maximum(sums[True], sums[False]), "max")
        return found.to(dtype)
    total: Tensor = all_reduce(group, sums[True] / copies + sums[False] / group.world_size, "sum")
    return (total ** (1.0 / norm_type)).to(dtype)


@torch.no_grad()
def whole(group: Group, tree: Any) -> Any:
    """``tree`` with whole tensors on the CPU, on rank 0; every rank calls this, others get ``{}``. One tensor at a time is gathered.

    A tensor that occurs several times is gathered once, and stays one.
    """
    gathered: dict[int, Tensor | None] = {}

    def gather(tensor: Tensor) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        if id(tensor) not in gathered:
            # Offloaded parts are on the CPU, and travel by the mesh's device.
            there: Any = tensor.detach().to(group.device)
            there = there.full_tensor()
            gathered[id(tensor)] = there.cpu() if group.is_main else None
        return gathered[id(tensor)]

    found = map_tensors(gather, tree)
    return found if group.is_main else {}


@torch.no_grad()
def part(value: Any, like: Any) -> Any:
    """The whole tensor ``value``, which every rank has, sharded as ``like`` is; anything of another shape, or not sharded, as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor)
