"""Seconds of a rank's step: operations, collectives, the host's memory and a pipeline's waiting, and what of it overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import WRAPPED, Collective, Operation, RankTrace

STEP_PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True, slots=True)
class Compute:
    """Of one rank's step, or of one phase of it."""

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Each operation at its own roof, one after another."""
    arithmetic_s: float = 0.0
    """Of the operations that arithmetic bounds."""
    memory_s: float = 0.0
    """Of those that memory traffic bounds."""
    dispatch_s: float = 0.0
    """In which the device waits for the host to start operations."""
    peak_s: float = 0.0
    """All FLOPs at the full peak of their dtype: no step is faster."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Compute) -> Compute:
        return Compute(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def compute_time(
    operations: Iterable[Operation], device: Hardware, *, tf32: bool = False, compiled: bool = False
) -> Compute:
    """Of these operations, one after another. The host starts them: beside a device, at most as far ahead as these operations go.

    Args:
        operations: of a step, or a part of it.
        tf32: products of float32 matrices are computed in TF32.
        compiled: ``torch.compile`` starts few kernels: the host's time for each operation does not count. Traffic stays that of single operations: an
            upper bound, as fused ones keep values in registers.
    """
    flops = moved = 0
    peak = host = 0.0
    bound = {"arithmetic": 0.0, "memory": 0.0, "dispatch": 0.0}
    start = 0.0 if compiled else device.dispatch
    for each in operations:
        if each.name.startswith(f"{WRAPPED}."):
            host += 0.0 if compiled else each.count * device.dtensor
            continue
        host += each.count * start
        fastest = each.flops / device.peak(each.dtype, tf32)
        times = {
            "arithmetic": fastest / device.reached.compute,
            "memory": each.bytes / (device.bandwidth * device.reached.memory),
            "dispatch": 0.0 if device.is_host else start,
        }
        longest = max(times, key=lambda name: times[name])
        bound[longest] += each.count * times[longest]
        flops += each.count * each.flops
        moved += each.count * each.bytes
        peak += each.count * fastest
    bound["dispatch"] += host if device.is_host else max(0.0, host - sum(bound.values()))
    return Compute(flops, moved, sum(bound.values()), bound["arithmetic"], bound["memory"], bound["dispatch"], peak)


def compute_assumptions(device: Hardware, *, tf32: bool, compiled: bool) -> list[str]:
    """What :func:`compute_time` assumes, a sentence each."""
    found = [
        f"reached: {device.reached.compute:.0%} of the dense peak by arithmetic, {device.reached.memory:.0%} of the memory's bandwidth by its "
        f"traffic, {device.reached.links:.0%} of the links' by collectives",
        "each operation takes the longer of its arithmetic and its memory traffic (each operand read once, each result written once)",
    ]
    if compiled:
        found.append(
            "compiled: the host's time for starting operations is left out; memory traffic is that of the single operations, which fusion lowers"
        )
    else:
        beside = (
            "and takes part in nothing else meanwhile"
            if device.is_host
            else "beside the device, which waits for it if it is slower"
        )
        found.append(
            f"eager: the host starts an operation in {device.dispatch * 1e6:.0f} us, one on a DTensor in {device.dtensor * 1e6:.0f} us more, {beside}"
        )
    if "tf32" in device.peaks:
        found.append(
            "float32 products are computed in TF32"
            if tf32
            else "float32 products are computed in float32 (matmul_precision='high' would use TF32)"
        )
    return found


def model_flops(operations: Iterable[Operation]) -> int:
    """FLOPs of a step without what activation checkpointing computes again: the backward pass has twice the forward pass's, or less."""
    forward = backward = rest = 0
    for each in operations:
        total = each.flops * each.count
        if each.phase == "forward":
            forward += total
        elif each.phase == "backward":
            backward += total
        else:
            rest += total
    return forward + min(backward, 2 * forward) + rest


START_S = 10e-6
"""Of every collective: NCCL's own model (src/graph/tuning.cc, ring, LL128)."""
COLLECTIVE_ASSUMPTIONS = (
    f"a collective takes {START_S * 1e6:.0f} us to start, a latency for each step of its ring, and its bytes over what is reached of the bandwidth",
    "rings: an all-reduce moves 2(n-1)/n of its bytes through each device, a gather, a scatter and an all-to-all (n-1)/n, a broadcast all of them",
    "an all-reduce between devices takes the faster of a ring and a double binary tree, whose latency grows with log2 of the nodes",
    "in a group on several nodes the slower of the links within a node and of all network cards of its members in a node sets the pace",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a group lie on nodes."""

    ranks: int
    nodes: int
    fewest: int
    """Members on the node that has the fewest of them."""


def layout(ranks: tuple[int, ...], ranks_per_node: int) -> Layout:
    """Of these ranks: neighbouring ranks share a node, as every launcher numbers them."""
    there = Counter(rank // ranks_per_node for rank in ranks)
    return Layout(len(ranks), len(there), min(there.values(), default=0))


def pace(where: Layout, device: Hardware, kind: str) -> float:
    """Bytes a second through each member of a group, as the links are stated."""
    within = device.within.of(kind).bandwidth if where.ranks > where.nodes else float("inf")
    between = device.between.of(kind).bandwidth * where.fewest if where.nodes > 1 else float("inf")
    return min(within, between)


def collective_seconds(each: Collective, device: Hardware, ranks_per_node: int) -> float:
    """Of all calls of ``each``, one after another, with nothing else on the links."""
    where = layout(each.ranks, ranks_per_node)
    if each.kind in ("send", "recv"):
        return _point_to_point(each, device, ranks_per_node)
    if where.ranks < 2 or not each.count:
        return 0.0
    n, size = where.ranks, each.bytes / each.count
    speed = pace(where, device, each.kind) * device.reached.links
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(each.kind, (n - 1) / n)
    rounds = 2 if each.kind == "all_reduce" else 1
    one = START_S + rounds * _ring(where, device, each.kind) + share * size / speed
    if each.kind == "all_reduce" and not device.is_host:
        one = min(one, START_S + 2 * _tree(where, device) + 2 * size / speed)
    return each.count * one


def _ring(where: Layout, device: Hardware, kind: str) -> float:
    """Latency of one way around: most steps stay within a node."""
    across = where.nodes - 1 if where.nodes > 1 else 0
    return (where.ranks - 1 - across) * device.within.of(kind).latency + across * device.between.of(kind).latency


def _tree(where: Layout, device: Hardware) -> float:
    members = -(-where.ranks // where.nodes)
    return (members - 1) * device.within.latency + (where.nodes - 1).bit_length() * device.between.latency


def _point_to_point(each: Collective, device: Hardware, ranks_per_node: int) -> float:
    """To or from neighbours on the axis: within a node only if the whole axis is."""
    where = layout(each.ranks, ranks_per_node)
    link = (device.within if where.nodes == 1 else device.between).of(each.kind)
    return each.count * (START_S + link.latency) + each.bytes / (link.bandwidth * device.reached.links)


_PARAMETERS, _STATE = "parameters", "optimizer_state"


def host_seconds(trace: RankTrace, device: Hardware) -> float:
    """Of one step: what crosses the link between host and device, and the optimizer's step in the host's memory. Nothing runs beside it."""
    if not trace.on_host or device.is_host:
        return 0.0
    gathered = _shards(trace, "all_gather")
    reduced = _shards(trace, "reduce_scatter") or _shards(trace, "all_reduce")
    # Parameters in the host's memory cross before each gather; others once, when the host's optimizer has changed them.
    crossing = reduced + (gathered if trace.on_host.get(_PARAMETERS) else reduced)
    traced = sum(each.bytes * each.count for each in trace.operations if each.phase == "optimizer step")
    stepping = max(traced, 2 * trace.on_host.get(_STATE, 0))
    return crossing / (device.to_host * device.reached.links) + stepping / (device.host_memory * device.reached.memory)


def _shards(trace: RankTrace, kind: str) -> float:
    """Bytes of this rank's part in the passes' collectives of a kind over the data axes."""
    return sum(
        each.bytes / len(each.ranks)
        for each in trace.collectives
        if each.kind == kind and each.phase in ("forward", "backward") and each.axis not in ("tp", "cp", "pp", "ep")
    )


def host_assumptions(trace: RankTrace, device: Hardware) -> list[str]:
    """What :func:`host_seconds` assumes, a sentence each."""
    if not trace.on_host or device.is_host:
        return []
    return [
        f"in the host's memory: {', '.join(trace.on_host)}; they cross a link of {device.to_host / 1e9:g} GB/s, and the host's optimizer moves "
        f"{device.host_memory / 1e9:g} GB/s for each device; nothing runs beside either"
    ]


STAGES_OF_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""Of a pipeline on one rank, by the schedule; those of :data:`engine.strategies.pipeline.SCHEDULES`, whose import takes a second."""
BUBBLE_FORMULAS = {
    "gpipe": "GPipe (Huang et al. 2019): (p-1)/(m+p-1)",
    "1f1b": "PipeDream-Flush (Narayanan et al. 2021): (p-1)/(m+p-1)",
    "interleaved": "interleaved 1F1B (Narayanan et al. 2021): (p-1)/(v m+p-1)",
    "zero_bubble": "ZB-H1 (Qi et al. 2023), interleaved: (p-1)/(3 v m+p-1), where forward, input gradients and weight gradients take equal times",
    "zbv": "ZB-V (Qi et al. 2024): (p-1)/(6 m+p-1) from the step's start to its end on all ranks, twice the waiting with at most p parts, where "
    "those three take equal times",
    "dualpipev": "DualPipeV (DeepSeek 2025): (p-1)/(3 m+p-1), where those three take equal times and nothing overlaps",
}
"""The formula of each schedule of :class:`engine.MeshParallel`: ``p`` ranks, ``m`` parts of a micro-batch, ``v`` stages on a rank."""


def bubble_fraction(schedule: str, ranks: int, parts: int) -> float:
    """The part of the step's time in which a rank of the pipeline has nothing to do, if all stages take equally long.

    Args:
        schedule: a key of :data:`BUBBLE_FORMULAS`.
        ranks: of the pipeline's axis.
        parts: of a micro-batch, ``num_microbatches``.
    """
    waiting, stages = ranks - 1, STAGES_OF_A_RANK[schedule]
    if ranks < 2:
        return 0.0
    if schedule == "zbv" and parts <= ranks:
        waiting *= 2
    work = {"zero_bubble": 3 * stages * parts, "dualpipev": 3 * parts, "zbv": 3 * stages * parts}
    return waiting / (work.get(schedule, stages * parts) + waiting)


_WITHIN_LAYERS = ("tp", "cp", "pp", "ep")
_PASSES = ("forward", "backward")
_OVERLAP = (
    "overlap: FSDP's gathers run beside the forward and the backward pass, its scatters and DDP's reductions beside the backward pass; DeepSpeed's "
    "only with overlap_comm, which is its default at stage 3; of the calls of one kind in a pass, one (the first gather, the last reduction) has "
    "nothing to run beside",
    "pipelines: a rank waits for what its neighbours send it; what it sends itself runs beside its next pass, and the other way over a link at the "
    "same time",
    "no overlap: collectives of tensor and context parallel, broadcasts, and what the optimizer's step sends (norms)",
    "collectives that overlap take no compute units and no memory bandwidth from the pass",
)
_NO_OVERLAP_ON_HOST = (
    "no overlap: the processor that computes also sends",
    "ranks are equally fast; that those which share a core wait for the slowest of them at each collective is not counted",
)


def overlap_assumptions(device: Hardware) -> tuple[str, ...]:
    """What :func:`step_time` assumes, a sentence each."""
    return _NO_OVERLAP_ON_HOST if device.is_host else _OVERLAP


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's collectives of one kind, axis and phase, with their time."""

    collective: Collective
    seconds: float
    overlaps: bool


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of one rank."""

    compute: Compute
    sent: tuple[Sent, ...]
    exposed_s: float
    """Communication that nothing hides, in the estimate."""
    bubble_s: float
    """The pipeline's waiting."""
    host_s: float
    """With what is in the host's memory."""
    expected_s: float
    """The estimate: compute, exposed communication, the bubble and the host's memory."""
    best_s: float
    """All communication beside the compute, no bubble."""
    worst_s: float
    """No communication beside the compute."""

    @property
    def communication_s(self) -> float:
        """All of it, one collective after another."""
        return sum(each.seconds for each in self.sent)


def overlaps(each: Collective) -> bool:
    """Whether a pass can run beside these collectives: gathers of parameters, reductions of gradients."""
    if each.kind == "send":
        return each.phase in _PASSES
    if each.axis in _WITHIN_LAYERS or each.phase not in _PASSES:
        return False
    return each.kind in ("all_gather", "reduce_scatter") or (each.kind == "all_reduce" and each.phase == "backward")


def step_time(
    trace: RankTrace,
    device: Hardware,
    ranks_per_node: int,
    *,
    bubble: float = 0.0,
    tf32: bool = False,
    compiled: bool = False,
) -> StepTime:
    """Of the rank of ``trace``.

    Args:
        trace: its step.
        device: its hardware.
        ranks_per_node: neighbouring ranks that share a node.
        bubble: the pipeline's share of waiting in the time of its passes.
        tf32, compiled: as in :func:`compute_time`.
    """
    sent = tuple(
        Sent(
            each,
            collective_seconds(each, device, ranks_per_node),
            trace.overlaps and overlaps(each) and not device.is_host,
        )
        for each in trace.collectives
    )
    parts = {
        inside: compute_time(
            (o for o in trace.operations if (o.phase in _PASSES and o.phase) == inside),
            device,
            tf32=tf32,
            compiled=compiled,
        )
        for inside in (*_PASSES, False)
    }
    passes = exposed = 0.0
    for phase in _PASSES:
        own = parts[phase].seconds
        hidden = [each for each in sent if each.overlaps and each.collective.phase == phase]
        here = sum(each.seconds for each in sent if not each.overlaps and each.collective.phase == phase)
        here += _uncovered(hidden, own)
        passes += own + here
        exposed += here
    rest = sum(each.seconds for each in sent if each.collective.phase not in _PASSES)
    whole, outside = sum(parts.values(), Compute()), parts[False].seconds
    waiting = passes * bubble / (1 - bubble)
    sending, host = sum(each.seconds for each in sent), host_seconds(trace, device)
    return StepTime(
        compute=whole,
        sent=sent,
        exposed_s=exposed + rest,
        bubble_s=waiting,
        host_s=host,
        expected_s=passes + waiting + outside + rest + host,
        best_s=whole.seconds + sending if device.is_host else max(whole.seconds, sending) + host,
        worst_s=whole.seconds + sending + host + (whole.seconds - outside + sending - rest) * bubble / (1 - bubble),
    )


def _uncovered(hidden: Sequence[Sent], own: float) -> float:
    """Seconds of overlapping collectives that a pass of ``own`` seconds does not cover."""
    alone = sum(each.seconds / each.collective.count for each in hidden if each.collective.count)
    return max(alone, sum(each.seconds for each in hidden) - own)
