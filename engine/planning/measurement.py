"""Measures the speeds that this machine reaches: arithmetic, memory traffic, the host's work, and the links between the ranks of a job."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.planning import torch_private
from engine.planning.device_table import Link
from engine.planning.step_time import START_S
from engine.utils import accelerator

_SECONDS = 0.2
"""The minimum duration of each repetition (s). The median of three repetitions counts, because other work on the machine slows some of them down."""
_REPETITIONS = 3
_SMALL = 8
"""Bytes of the collectives whose latency is measured."""
_LARGE, _LARGE_ON_CPU = 32 * 2**20, 8 * 2**20
"""Bytes of the collectives whose bandwidth is measured."""
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often each kind of collective passes its data around the ring, as in :mod:`engine.planning.step_time`."""


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """Speeds that a rank reaches while all ranks work: those of the slowest rank if each has its own device, the mean over the ranks that share a
    processor."""

    device: str
    ranks: int
    memory: int
    peaks: dict[str, float] = field(default_factory=dict)
    """Operations a second by the short name of the dtype, ``"bf16"``."""
    bandwidth: float = 0.0
    dispatch: float = 0.0
    """Seconds to launch an operation of a training, including the work of Python and autograd for it."""
    dtensor: float | None = None
    """Additional seconds for an operation on a ``DTensor``; ``None``: the job has one rank."""
    within: Link | None = None
    """Link between ranks of one node; ``None``: no node has two ranks."""
    between: Link | None = None
    """Link between ranks of two nodes; ``None``: there is one node."""

    @property
    def as_device(self) -> str:
        """The text for ``--device``."""
        base = "cpu," if self.device == "cpu" else ""
        speeds = ",".join(f"{name}={value:.3g}" for name, value in self.peaks.items())
        dtensor_text = "" if self.dtensor is None else f",dtensor={self.dtensor:.2g}"
        return f"measured:{base}{self.memory},{speeds},host={self.dispatch:.2g}{dtensor_text},{self.bandwidth:.3g}"

    @property
    def as_network(self) -> str | None:
        """The text for ``--network``; ``None``: the job has one rank."""
        links = [link for link in (self.within, self.between) if link is not None]
        if not links:
            return None
        return "measured:" + ",".join(
            ",".join(
                [
                    f"{link.bandwidth:.3g}:{link.latency:.2g}",
                    *(f"{kind}={rate:.3g}:{latency:.2g}" for kind, (rate, latency) in link.kinds.items()),
                ]
            )
            for link in links
        )


def measure_machine(group: Group) -> MachineSpeeds:
    """Measure on all ranks of a job at the same time, which takes about twenty seconds. A collective."""
    clock = _Clock(group)
    speeds = {f"peak {name}": _product(clock, dtype, tf32) for name, dtype, tf32 in _dtypes(group.device)}
    speeds |= {"bandwidth": _copy(clock), **_host(clock), **_links(group), "memory": float(_memory(group))}
    slowest = _slowest_of_ranks(group, gather_json(group, speeds))
    return MachineSpeeds(
        device=group.device.type,
        ranks=group.world_size,
        memory=int(slowest["memory"]),
        peaks={name.removeprefix("peak "): value for name, value in slowest.items() if name.startswith("peak ")},
        bandwidth=slowest["bandwidth"],
        dispatch=1 / slowest["starts"],
        dtensor=1 / slowest["dtensors"] if "dtensors" in slowest else None,
        within=_link(slowest, "within"),
        between=_link(slowest, "between"),
    )


def _slowest_of_ranks(group: Group, rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The lowest speeds of all ranks. On CPUs the mean over a node's ranks counts instead of each rank's own speed: they share a processor, and one
    that is ahead waits for the others."""
    ranks_per_node = group.world_size // _nodes(group) if group.device.type == "cpu" else 1
    nodes = [rows[first : first + ranks_per_node] for first in range(0, len(rows), ranks_per_node)]
    return {name: min(fmean(row[name] for row in node) for node in nodes) for name in rows[0]}


def _link(speeds: dict[str, float], name: str) -> Link | None:
    if f"{name} all_reduce rate" not in speeds:
        return None
    kinds = {kind: (speeds[f"{name} {kind} rate"], 1 / speeds[f"{name} {kind} steps"]) for kind in _ROUNDS}
    return Link(*kinds.pop("all_reduce"), kinds)


def _dtypes(device: torch.device) -> list[tuple[str, torch.dtype, bool]]:
    """Short name, dtype, and whether TF32 is used, of each kind of product that the device supports."""
    dtypes = [("fp32", torch.float32, False)]
    if device.type == "cuda":
        dtypes.append(("tf32", torch.float32, True))
    if accelerator.computes_in(device, torch.bfloat16):
        dtypes.append(("bf16", torch.bfloat16, False))
    if device.type != "cpu":
        dtypes.append(("fp16", torch.float16, False))
    return dtypes


class _Clock:
    """Times work that all ranks do at the same time.

    Args:
        group: the ranks; they start each repetition together.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.device = group, group.device

    def rate(self, work: Callable[[], object]) -> float:
        """Calls a second: the median of a few repetitions."""
        return self.rates(work)[0]

    def rates(self, *works: Callable[[], object]) -> list[float]:
        """Calls a second of several pieces of work. They are timed alternately, so that they can be compared."""
        for work in works:
            self._timed(work, 0.0)
        repetitions = [[self._timed(work, _SECONDS) for work in works] for _ in range(_REPETITIONS)]
        return [median(samples) for samples in zip(*repetitions, strict=True)]

    def seconds(self, work: Callable[[], object], calls: int) -> float:
        """Seconds of one call, when every rank makes ``calls`` calls: the median of a few repetitions."""
        durations = []
        for _ in range(_REPETITIONS + 1):
            self.group.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self._finish()
            durations.append((time.perf_counter() - began) / calls)
        return median(durations[1:])  # without the first, which opens connections

    def _timed(self, work: Callable[[], object], seconds: float) -> float:
        """Calls a second of ``work``, which is called for at least ``seconds``, and at least once."""
        self.group.barrier()
        self._finish()
        began, calls, repeats, elapsed = time.perf_counter(), 0, 1, 0.0
        while calls == 0 or elapsed < seconds:
            for _ in range(repeats):
                work()
            self._finish()
            calls, repeats, elapsed = calls + repeats, repeats * 2, time.perf_counter() - began
        return calls / elapsed

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _product(clock: _Clock, dtype: torch.dtype, tf32: bool) -> float:
    """Operations a second in a product of large square matrices."""
    n = 512 if clock.device.type == "cpu" else 8192
    a, b = (torch.ones(n, n, device=clock.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    earlier_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return 2 * n**3 * clock.rate(lambda: torch.mm(a, b, out=out))
    finally:
        torch.set_float32_matmul_precision(earlier_precision)


def _copy(clock: _Clock) -> float:
    """Bytes a second, read and written, in a copy that is too large for caches."""
    size = 2**26 if clock.device.type == "cpu" else 2**30
    source, target = (torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
    return 2 * size * clock.rate(lambda: target.copy_(source))


class _CountingMode(torch_private.Mode):
    """Counts operations as a plan does: ``direct`` without views, and ``wrapped`` on tensors that wrap others, which come again on the local ones."""

    def __init__(self) -> None:
        super().__init__()
        self.direct = self.wrapped = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.wraps(types):
            self.wrapped += 1
            return NotImplemented
        self.direct += not operator.is_view
        return operator(*args, **(kwargs or {}))


def _host(clock: _Clock) -> dict[str, float]:
    """Operations a second that the host launches in both passes of a network with tiny tensors, and how many ``DTensor`` operations a second it
    derives."""
    width = 8
    network = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(8))
    ).to(clock.device)
    inputs = torch.ones(1, width, device=clock.device)
    passes = _passes(network, inputs)
    with _CountingMode() as counts:
        passes()
    if clock.group.world_size == 1:
        return {"starts": clock.rate(passes) * counts.direct}
    mesh = _single_rank_mesh(clock.group)
    sharded = copy.deepcopy(network)
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(local))
    sharded_passes = _passes(sharded, DTensor.from_local(inputs, mesh, [Replicate()], run_check=False))
    with _CountingMode() as sharded_counts:
        sharded_passes()
    plain_s, sharded_s = (1 / rate for rate in clock.rates(passes, sharded_passes))
    start_s = plain_s / counts.direct
    dtensor_s = (sharded_s - start_s * sharded_counts.direct) / sharded_counts.wrapped
    return {"starts": 1 / start_s, "dtensors": 1 / max(dtensor_s, 1e-7)}


def _passes(network: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """A function that runs one forward and one backward pass."""

    def forward_and_backward() -> None:
        with torch.enable_grad():
            network.zero_grad(set_to_none=True)
            network(inputs).sum().backward()

    return forward_and_backward


def _single_rank_mesh(group: Group) -> DeviceMesh:
    """A mesh of this rank alone: its operations send nothing."""
    channel = group.part_for_device([[rank] for rank in range(group.world_size)])
    assert channel is not None
    return DeviceMesh.from_group(channel, group.device.type)


def _memory(group: Group) -> int:
    """Bytes of a rank's memory; ranks of a node that compute on the CPU get equal shares of the node's."""
    if group.device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, group.world_size // _nodes(group))
    return int(torch.accelerator.get_memory_info(group.device)[1])


def _nodes(group: Group) -> int:
    return max(1, group.environment.num_nodes)


def _links(group: Group) -> dict[str, float]:
    """The speeds of collectives within the nodes and between them: bandwidth (bytes a second) and steps of a ring a second."""
    ranks, nodes = group.world_size, _nodes(group)
    ranks_per_node = ranks // nodes
    speeds: dict[str, float] = {}
    if ranks_per_node > 1:
        speeds |= _rings(
            group, [range(node * ranks_per_node, (node + 1) * ranks_per_node) for node in range(nodes)], "within"
        )
    if nodes > 1:
        speeds |= _rings(group, [range(local, ranks, ranks_per_node) for local in range(ranks_per_node)], "between")
    return speeds


def _rings(group: Group, parts: Sequence[range], name: str) -> dict[str, float]:
    """The speeds of each kind of collective in all groups of ``parts`` at the same time."""
    channel, size = group.part_for_device([list(part) for part in parts]), len(parts[0])
    clock, speeds = _Clock(group), {}
    large = _LARGE_ON_CPU if group.device.type == "cpu" else _LARGE
    for kind, rounds in _ROUNDS.items():
        small_s, large_s = (_collective(clock, kind, length, size, channel) for length in (_SMALL, large))
        step = max(small_s - START_S, 1e-7) / (rounds * (size - 1))
        speeds[f"{name} {kind} steps"] = 1 / step
        speeds[f"{name} {kind} rate"] = rounds * (size - 1) / size * large / max(large_s - small_s, 1e-9)
    return speeds


def _collective(clock: _Clock, kind: str, length: int, size: int, channel: Any) -> float:
    """Seconds of one collective of about ``length`` bytes among ``size`` ranks."""
    part = torch.zeros(max(1, length // 4 // size), device=clock.device)
    full = torch.zeros(part.numel() * size, device=clock.device)
    calls = 100 if length == _SMALL else 5
    # Since torch 2.13 the functions have new names, and the older names warn.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=channel),
        "all_gather": lambda: gather(full, part, group=channel),
        "reduce_scatter": lambda: scatter(part, full, group=channel),
    }
    return clock.seconds(work[kind], calls)
