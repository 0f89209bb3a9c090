"""What this machine reaches: arithmetic, memory traffic, and links between the ranks of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.planning.device_table import Link
from engine.planning.network import START_S
from engine.utils import accelerator

_SECONDS = 0.2
"""Of each repetition at least; the fastest of three counts."""
_SMALL, _LARGE = 8, 32 * 2**20
"""Bytes of the collectives that latency and bandwidth are measured with."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The slowest rank's numbers, with all ranks at work at once."""

    device: str
    ranks: int
    memory: int
    peaks: dict[str, float] = field(default_factory=dict)
    """Operations a second by the short name of the dtype, ``"bf16"``."""
    bandwidth: float = 0.0
    dispatch: float = 0.0
    within: Link | None = None
    """Between ranks of one node; ``None``: no node has two."""
    between: Link | None = None
    """Between ranks of two nodes; ``None``: there is one node."""

    @property
    def as_device(self) -> str:
        """For ``--device``."""
        base = "cpu," if self.device == "cpu" else ""
        speeds = ",".join(f"{name}={value:.3g}" for name, value in self.peaks.items())
        return f"measured:{base}{self.memory},{speeds},host={self.dispatch:.2g},{self.bandwidth:.3g}"

    @property
    def as_network(self) -> str | None:
        """For ``--network``; ``None``: one rank alone."""
        links = [each for each in (self.within, self.between) if each is not None]
        if not links:
            return None
        return "measured:" + ",".join(f"{each.bandwidth:.3g}:{each.latency:.2g}" for each in links)


def measured(group: Group) -> Measured:
    """Measure on all ranks of a job at once, about ten seconds. A collective."""
    device = group.device
    with torch.inference_mode():
        own = {f"peak {name}": _product(device, dtype, tf32) for name, dtype, tf32 in _dtypes(device)}
        own |= {"bandwidth": _copy(device), "per_second": _starts(device)}
        own |= {name: value for name, value in _links(group).items() if value}
    own["memory"] = _memory(group)
    rows = gather_json(group, own)
    slowest = {name: min(row[name] for row in rows) for name in own if all(name in row for row in rows)}
    return Measured(
        device=device.type,
        ranks=group.world_size,
        memory=int(slowest["memory"]),
        peaks={name.removeprefix("peak "): value for name, value in slowest.items() if name.startswith("peak ")},
        bandwidth=slowest["bandwidth"],
        dispatch=1 / slowest["per_second"],
        within=_link(slowest, "within"),
        between=_link(slowest, "between"),
    )


def _link(found: dict[str, float], name: str) -> Link | None:
    return Link(found[f"{name} rate"], 1 / found[f"{name} per_second"]) if f"{name} rate" in found else None


def _dtypes(device: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    found = [("fp32", torch.float32, False)]
    if device.type == "cuda":
        found.append(("tf32", torch.float32, True))
    if accelerator.computes_in(device, torch.bfloat16):
        found.append(("bf16", torch.bfloat16, False))
    if device.type != "cpu":
        found.append(("fp16", torch.float16, False))
    return found


def _product(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """Operations a second in a product of large square matrices."""
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return 2 * n**3 / _fastest(lambda: torch.mm(a, b, out=out), device)
    finally:
        torch.set_float32_matmul_precision(before)


def _copy(device: torch.device) -> float:
    """Bytes a second, read and written, in a copy that no cache holds."""
    size = 2**28 if device.type == "cpu" else 2**30
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def _starts(device: torch.device) -> float:
    """Operations on one element that the host starts in a second."""
    one = torch.zeros(1, device=device)
    return 1 / _fastest(lambda: one.add_(1.0), device, many=1000)


def _fastest(work: Callable[[], object], device: torch.device, many: int = 1) -> float:
    """Seconds of one call, of the fastest of three repetitions."""

    def timed(calls: int) -> float:
        _finish(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        _finish(device)
        return time.perf_counter() - began

    timed(many)
    while (taken := timed(many)) < _SECONDS:
        many *= max(2, int(_SECONDS / max(taken, 1e-9)))
    return min(taken, timed(many), timed(many)) / many


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _memory(group: Group) -> int:
    """Bytes of a rank's device; the ranks of a node share its memory if they compute on the CPU."""
    if group.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, group.world_size // _nodes(group))
    return int(torch.accelerator.get_memory_info(group.device)[1])


def _nodes(group: Group) -> int:
    return max(1, group.environment.num_nodes)


def _links(group: Group) -> dict[str, float]:
    """Bandwidth of a device, and steps of a ring a second, of all-reduces within the nodes and between them."""
    ranks, nodes = group.world_size, _nodes(group)
    each = ranks // nodes
    found: dict[str, float] = {}
    if each > 1:
        found |= _reductions(group, [range(node * each, (node + 1) * each) for node in range(nodes)], "within")
    if nodes > 1:
        found |= _reductions(group, [range(local, ranks, each) for local in range(each)], "between")
    return found


def _reductions(group: Group, parts: Sequence[range], name: str) -> dict[str, float]:
    """Of all-reduces in each of ``parts`` at the same time."""
    channel = group.divided([list(part) for part in parts])
    size = len(parts[0])
    times = {}
    for length in (_SMALL, _LARGE):
        tensor = torch.zeros(length // 4, device=group.device)
        calls = 200 if length == _SMALL else 5
        best = float("inf")
        for repetition in range(4):  # the first opens connections
            group.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor, group=channel)
            _finish(group.device)
            if repetition:
                best = min(best, (time.perf_counter() - began) / calls)
        times[length] = best
    step = max(times[_SMALL] - START_S, 1e-7) / (2 * (size - 1))
    moving = max(times[_LARGE] - times[_SMALL], 1e-9)
    return {f"{name} rate": 2 * (size - 1) / size * _LARGE / moving, f"{name} per_second": 1 / step}
