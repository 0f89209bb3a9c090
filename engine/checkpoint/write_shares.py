"""Which rank writes which shard of which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from engine.checkpoint.tensors import is_cut


class Part(NamedTuple):
    """This rank's part of a tensor."""

    tensor: Tensor
    """Shares the memory of the original, on its device."""
    offsets: tuple[int, ...]
    """Where in the whole tensor it starts."""


FILE = 1 << 27
"""Bytes above which a rank's parts go into several files, which are written concurrently."""
MOST_FILES = 8

Row = tuple[str, tuple[int, ...], int]
"""Name, offsets, bytes."""


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """This rank's part of each tensor that is not empty here (``DTensor``: its shard; others: all)."""
    cut = {name: tensor for name, tensor in tensors.items() if is_cut(tensor)}
    found = {name: Part(tensor.detach(), (0,) * tensor.ndim) for name, tensor in tensors.items() if name not in cut}
    return found | _cut_parts(cut) if cut else found


def _cut_parts(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    # Imported here: it takes 0.7 s.
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    found: dict[str, Part] = {}
    for item in planner.create_local_plan().items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        if chunk.sizes.numel() or not item.tensor_data.size.numel():
            local = planner.resolve_data(item)
            assert isinstance(local, Tensor)
            found[item.index.fqn] = Part(local, tuple(chunk.offsets))
    return found


def rows(parts: Mapping[str, Part]) -> list[Row]:
    """What the other ranks need to know about these parts."""
    return [(name, part.offsets, part.tensor.numel() * part.tensor.element_size()) for name, part in parts.items()]


def deal(every: list[Any], rank: int) -> set[str]:
    """The names whose part this rank writes. Among ranks with the same part, the one with the least to write takes it.

    Args:
        every: the :func:`rows` of each rank, and whether the lowest rank that has it must write it; all ranks compute the same answer.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for holder, own in enumerate(every):
        for name, offsets, size, fixed in own:
            key = (name, tuple(offsets))
            if not fixed or key not in holders:
                holders.setdefault(key, []).append(holder)
            sizes[key] = size
    load = [0] * len(every)
    mine: set[str] = set()
    for key in sorted(holders, key=lambda key: -sizes[key]):  # the large ones first: this balances the loads
        writer = min(holders[key], key=lambda holder: load[holder])
        load[writer] += sizes[key]
        if writer == rank:
            mine.add(key[0])
    return mine


def divide(parts: Mapping[str, Part]) -> list[dict[str, Part]]:
    """A rank's parts in as many files as are worth writing concurrently, of about equal size; none for no parts."""
    sizes = {name: size for name, _, size in rows(parts)}
    count = min(MOST_FILES, max(1, sum(sizes.values()) // FILE))
    files: list[dict[str, Part]] = [{} for _ in range(count)]
    load = [0] * count
    for name in sorted(parts, key=lambda name: (-sizes[name], name)):
        least = load.index(min(load))
        files[least][name] = parts[name]
        load[least] += sizes[name]
    return [file for file in files if file]
