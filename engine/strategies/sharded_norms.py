"""The norms of gradients and parameters that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.distributed.collectives import all_reduce
from engine.distributed.group import Group
from engine.step.gradients import squares_of
from engine.strategies.dtensors import shard_count
from engine.utils import accelerator


def norm(
    group: Group, tensors: Sequence[Tensor], norm_type: float, holders: Callable[[Tensor], int], device: torch.device
) -> Tensor:
    """The norm of all ``tensors`` together, over all ranks; see :func:`norms` for the arguments. Shape ``()``."""
    return norms(group, [tensors], norm_type, holders, device)[0]


@torch.no_grad()
def norm_of_each(
    group: Group,
    grads: Sequence[Tensor | None],
    first: int,
    count: int,
    holders: Callable[[Tensor], int],
    ranks: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The 2-norms of gradients over all ranks, and that of all together, by one collective. Shapes ``[len(grads)]`` and ``()``.

    Args:
        grads: this rank's gradients, ``None`` where there is none.
        first, count: where they are among the gradients of all ranks, and how many there are of these: stages of a pipeline have different ones.
        holders: gives how many ranks have a shard of a gradient, including copies and other stages that share its parameter.
        ranks: how many of them call this with the gradient at the same place.
        device: the device of the results.
    """
    parts = {i: g.to_local() if isinstance(g, DTensor) else g for i, g in enumerate(grads) if g is not None}
    parts = {i: part for i, part in parts.items() if part.numel()}
    squares = dict(zip(parts, squares_of(list(parts.values()), device), strict=True))
    zero = torch.zeros((), dtype=accelerator.wide(device), device=device)
    entries, total = [zero] * (count + 1), zero
    for index, square in squares.items():
        grad = grads[index]
        assert grad is not None
        shards = shard_count(grad)
        entries[first + index] = square / (ranks / shards)
        total = total + square / (holders(grad) / shards)
    entries[-1] = total
    norms_of_all: Tensor = all_reduce(group, torch.stack(entries)).sqrt()
    return norms_of_all[first : first + len(grads)], norms_of_all[-1]


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
        lists: lists of sharded and whole tensors; a list is empty if only other ranks have its tensors.
        holders: gives how many ranks have a shard of a tensor, including copies: each shard is on ``holders(t) / shard_count(t)`` ranks.
        device: the device of the result.
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
