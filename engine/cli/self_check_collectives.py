"""Every collective that the library calls, once, with results that can be worked out by hand: for ``fit test`` and for the tests on devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed import collectives, process_groups
from engine.distributed.group import Group
from engine.distributed.stop_agreement import STOP, Agreement, Stopwatch


def check(group: Group) -> None:
    """Call them on this group's device and on the CPU; all ranks do.

    Raises:
        AssertionError: one returned something else than it should.
    """
    for device in dict.fromkeys((torch.device("cpu"), group.device)):
        _on(group, device)
    _objects(group)
    _bare(group)
    group.barrier()


def _on(group: Group, device: torch.device) -> None:
    size, where = group.world_size, f"on {device}"
    mine = torch.full((3,), float(group.rank + 1), device=device)
    total = size * (size + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op, expected in {"sum": total, "mean": total / size, "min": 1, "max": size}.items():
            found = collectives.all_reduce(group, mine.to(dtype), op)
            _same(f"all_reduce ({op}, {dtype}) {where}", found, [expected] * 3)
    _same(f"all_reduce (sum, bool) {where}", collectives.all_reduce(group, mine > 1), [size - 1] * 3)
    _same(f"gather {where}", collectives.gather(group, mine[:1]), list(range(1, size + 1)))
    uneven = collectives.gather(group, mine[:1].expand(group.rank + 1))
    _same(f"gather of other lengths {where}", uneven, [rank + 1 for rank in range(size) for _ in range(rank + 1)])
    _same(f"broadcast {where}", collectives.broadcast(group, mine, size - 1), [size] * 3)
    padded = collectives.pad_across_processes(group, torch.ones(group.rank + 1, device=device), pad_index=-1)
    _same(f"pad_across_processes {where}", padded, [1] * (group.rank + 1) + [-1] * (size - group.rank - 1))


def _objects(group: Group) -> None:
    everybody = list(range(group.world_size))
    _same("gather_json", collectives.gather_json(group, group.rank), everybody)
    _same("gather_object", collectives.gather_object(group, group.rank), everybody)
    _same("broadcast_object", collectives.broadcast_object(group, group.rank, group.world_size - 1), everybody[-1])
    agreement = Agreement(group, Stopwatch())
    assert agreement.agree_now(STOP if group.is_main else 0), "the ranks did not agree to stop"


def _bare(group: Group) -> None:
    """What FSDP and the pipeline's schedules call, in a group of its own for the device's tensors."""
    size = group.world_size
    made = process_groups.on_device([list(range(size))], group.device)
    mine = torch.full((2,), float(group.rank + 1), device=group.device)
    rows = mine.new_empty(2 * size)
    _named("all_gather_single", "all_gather_into_tensor")(rows, mine, group=made)
    _same("all_gather_into_tensor", rows, [rank + 1 for rank in range(size) for _ in range(2)])
    part = mine.new_empty(2)
    _named("reduce_scatter_single", "reduce_scatter_tensor")(
        part, torch.ones(2 * size, device=group.device), group=made
    )
    _same("reduce_scatter_tensor", part, [size] * 2)
    work = dist.all_reduce(mine, async_op=True, group=made)
    assert work is not None
    work.wait()
    _same("all_reduce in the background", mine, [size * (size + 1) / 2] * 2)
    if size > 1:  # nobody sends to itself
        (after, before) = ((group.rank + 1) % size, (group.rank - 1) % size)
        sent, received = torch.full((2,), float(group.rank), device=group.device), torch.empty(2, device=group.device)
        pair = [dist.P2POp(dist.isend, sent, after, made), dist.P2POp(dist.irecv, received, before, made)]
        for each in dist.batch_isend_irecv(pair):
            each.wait()
        _same("send and recv", received, [before] * 2)
    dist.destroy_process_group(made)


def _named(name: str, before: str) -> Any:
    """A collective under its name since torch 2.13, or its name before."""
    return getattr(dist, name, None) or getattr(dist, before)


def _same(what: str, found: object, expected: object) -> None:
    told = found.tolist() if isinstance(found, Tensor) else found
    assert told == expected, f"{what} returned {told}, not {expected}"
