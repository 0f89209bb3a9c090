"""The time of a rank's step: operations, collectives, the host's memory, a pipeline's waiting, and what overlaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import WRAPPED, Collective, Operation, RankTrace

STEP_PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True, slots=True)
class Compute:
    """The computation of one rank's step, or of one phase of it."""

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Seconds of all operations, one after another, each bounded by arithmetic, memory traffic or the host."""
    arithmetic_s: float = 0.0
    """Seconds of the operations that are bound by arithmetic."""
    memory_s: float = 0.0
    """Seconds of the operations that are bound by memory traffic."""
    dispatch_s: float = 0.0
    """Seconds that the device waits for the host to launch operations."""
    peak_s: float = 0.0
    """Seconds of all FLOPs at the full peak of their dtypes, which no step can undercut."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory traffic."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Compute) -> Compute:
        return Compute(*(getattr(self, entry.name) + getattr(other, entry.name) for entry in fields(self)))


def compute_time(
    operations: Iterable[Operation], device: Hardware, *, tf32: bool = False, compiled: bool = False
) -> Compute:
    """The time of ``operations``, one after another. The host launches them, ahead of a device, but not before the first of them begins.

    Args:
        operations: the operations of a step, or of a part of it.
        tf32: whether products of float32 matrices are computed in TF32.
        compiled: whether the step is compiled. ``torch.compile`` launches few kernels, so the host's time for each operation is not counted.
            Memory traffic is that of the single operations: an upper bound, because fused operations keep values in registers.
    """
    flops = moved = 0
    peak = host = 0.0
    bound = {"arithmetic": 0.0, "memory": 0.0, "dispatch": 0.0}
    start = 0.0 if compiled else device.dispatch
    for operation in operations:
        if operation.name.startswith(f"{WRAPPED}."):
            host += 0.0 if compiled else operation.count * device.dtensor
            continue
        host += operation.count * start
        fastest = operation.flops / device.peak(operation.dtype, tf32)
        times = {
            "arithmetic": fastest / device.reached.compute,
            "memory": operation.bytes / (device.bandwidth * device.reached.memory),
            "dispatch": 0.0 if device.is_host else start,
        }
        longest = max(times, key=lambda name: times[name])
        bound[longest] += operation.count * times[longest]
        flops += operation.count * operation.flops
        moved += operation.count * operation.bytes
        peak += operation.count * fastest
    bound["dispatch"] += host if device.is_host else max(0.0, host - sum(bound.values()))
    return Compute(flops, moved, sum(bound.values()), bound["arithmetic"], bound["memory"], bound["dispatch"], peak)


def compute_assumptions(device: Hardware, *, tf32: bool, compiled: bool) -> list[str]:
    """Sentences on what :func:`compute_time` assumes."""
    sentences = [
        f"reached: {device.reached.compute:.0%} of the dense peak by arithmetic, {device.reached.memory:.0%} of the memory's bandwidth by its "
        f"traffic, {device.reached.links:.0%} of the links' by collectives",
        "each operation takes the longer of its arithmetic and its memory traffic (each operand read once, each result written once)",
    ]
    if compiled:
        sentences.append(
            "compiled: the host's time for starting operations is left out; memory traffic is that of the single operations, which fusion lowers"
        )
    else:
        host_role = (
            "and takes part in nothing else meanwhile"
            if device.is_host
            else "beside the device, which waits for it if it is slower"
        )
        sentences.append(
            f"eager: the host starts an operation in {device.dispatch * 1e6:.0f} us, one on a DTensor in {device.dtensor * 1e6:.0f} us more, "
            f"{host_role}"
        )
    if "tf32" in device.peaks:
        sentences.append(
            "float32 products are computed in TF32"
            if tf32
            else "float32 products are computed in float32 (matmul_precision='high' would use TF32)"
        )
    return sentences


def model_flops(operations: Iterable[Operation]) -> int:
    """FLOPs of a step without recomputation: of the backward pass at most twice the forward pass's FLOPs count."""
    forward = backward = other_phases = 0
    for operation in operations:
        total = operation.flops * operation.count
        if operation.phase == "forward":
            forward += total
        elif operation.phase == "backward":
            backward += total
        else:
            other_phases += total
    return forward + min(backward, 2 * forward) + other_phases


START_S = 10e-6
"""Seconds to start a collective: NCCL's own model (src/graph/tuning.cc, ring, LL128)."""
COLLECTIVE_ASSUMPTIONS = (
    f"a collective takes {START_S * 1e6:.0f} us to start, a latency for each step of its ring, and its bytes over what is reached of the bandwidth",
    "rings: an all-reduce moves 2(n-1)/n of its bytes through each device, a gather and a scatter (n-1)/n, a broadcast and an all-to-all all of them",
    "an all-reduce between devices takes the faster of a ring and a double binary tree, whose latency grows with log2 of the nodes",
    "in a group on several nodes the slower of the links within a node and of all network cards of its members in a node sets the pace",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The distribution of a group's ranks over nodes."""

    ranks: int
    nodes: int
    fewest: int
    """The number of members on the node with the fewest."""


def layout(ranks: tuple[int, ...], ranks_per_node: int) -> Layout:
    """The distribution of ``ranks`` over nodes: neighbouring ranks share a node, as every launcher numbers them."""
    members = Counter(rank // ranks_per_node for rank in ranks)
    return Layout(len(ranks), len(members), min(members.values(), default=0))


def pace(placement: Layout, device: Hardware, kind: str) -> float:
    """The stated bandwidth, in bytes a second, through each member of a group, of the slower of its links."""
    node_rate = device.within.for_kind(kind).bandwidth if placement.ranks > placement.nodes else float("inf")
    network_rate = device.between.for_kind(kind).bandwidth * placement.fewest if placement.nodes > 1 else float("inf")
    return min(node_rate, network_rate)


def collective_seconds(collective: Collective, device: Hardware, ranks_per_node: int) -> float:
    """Seconds of all calls of ``collective``, one after another, with nothing else on the links."""
    placement = layout(collective.ranks, ranks_per_node)
    if collective.kind in ("send", "recv"):
        return _point_to_point(collective, device, ranks_per_node)
    if placement.ranks < 2 or not collective.count:
        return 0.0
    n, size = placement.ranks, collective.bytes / collective.count
    speed = pace(placement, device, collective.kind) * device.reached.links
    share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "all_to_all": 1.0}.get(collective.kind, (n - 1) / n)
    rounds = 2 if collective.kind == "all_reduce" else 1
    call_s = START_S + rounds * _ring(placement, device, collective.kind) + share * size / speed
    if collective.kind == "all_reduce" and not device.is_host:
        call_s = min(call_s, START_S + 2 * _tree(placement, device) + 2 * size / speed)
    return collective.count * call_s


def _ring(placement: Layout, device: Hardware, kind: str) -> float:
    """Latency of one pass around the ring, most of whose steps are within a node."""
    network_steps = placement.nodes - 1 if placement.nodes > 1 else 0
    node_steps = placement.ranks - 1 - network_steps
    return node_steps * device.within.for_kind(kind).latency + network_steps * device.between.for_kind(kind).latency


def _tree(placement: Layout, device: Hardware) -> float:
    """Latency of one pass through a tree over the nodes, and through the ranks of each node."""
    members = -(-placement.ranks // placement.nodes)
    return (members - 1) * device.within.latency + (placement.nodes - 1).bit_length() * device.between.latency


def _point_to_point(transfer: Collective, device: Hardware, ranks_per_node: int) -> float:
    """Seconds of sending to, or receiving from, neighbours on the axis. The link within a node counts only if the whole axis is on one node."""
    placement = layout(transfer.ranks, ranks_per_node)
    link = (device.within if placement.nodes == 1 else device.between).for_kind(transfer.kind)
    return transfer.count * (START_S + link.latency) + transfer.bytes / (link.bandwidth * device.reached.links)


_PARAMETERS, _STATE = "parameters", "optimizer_state"


def host_seconds(trace: RankTrace, device: Hardware) -> float:
    """Seconds of one step for transfers between host and device, and for the optimizer's step in the host's memory. Nothing overlaps with them."""
    if not trace.on_host or device.is_host:
        return 0.0
    gathered = _shards(trace, "all_gather")
    reduced = _shards(trace, "reduce_scatter") or _shards(trace, "all_reduce")
    # Parameters in the host's memory are copied to the device before each gather; others once, after the host's optimizer has changed them.
    crossing_bytes = reduced + (gathered if trace.on_host.get(_PARAMETERS) else reduced)
    traced = sum(
        operation.bytes * operation.count for operation in trace.operations if operation.phase == "optimizer step"
    )
    step_bytes = max(traced, 2 * trace.on_host.get(_STATE, 0))
    return crossing_bytes / (device.to_host * device.reached.links) + step_bytes / (
        device.host_memory * device.reached.memory
    )


def _shards(trace: RankTrace, kind: str) -> float:
    """Bytes of this rank's shards in the collectives of one kind over the data axes during the passes."""
    return sum(
        collective.bytes / len(collective.ranks)
        for collective in trace.collectives
        if collective.kind == kind
        and collective.phase in ("forward", "backward")
        and collective.axis not in ("tp", "cp", "pp", "ep")
    )


def host_assumptions(trace: RankTrace, device: Hardware) -> list[str]:
    """Sentences on what :func:`host_seconds` assumes."""
    if not trace.on_host or device.is_host:
        return []
    return [
        f"in the host's memory: {', '.join(trace.on_host)}; they cross a link of {device.to_host / 1e9:g} GB/s, and the host's optimizer moves "
        f"{device.host_memory / 1e9:g} GB/s for each device; nothing runs beside either"
    ]


def offload_seconds(trace: RankTrace, device: Hardware) -> dict[str, float]:
    """Seconds in which activations cross the link to the host and back in a step, by the pass that they run beside."""
    moved = trace.offloaded
    if moved is None or device.is_host:
        return {}
    rate = device.to_host * device.reached.links
    return {"forward": moved.sent_bytes / rate, "backward": moved.returned_bytes / rate}


def offload_assumptions(trace: RankTrace, device: Hardware) -> list[str]:
    """Sentences on what :func:`offload_seconds` assumes."""
    if trace.offloaded is None or device.is_host:
        return []
    return [
        f"activations cross a link of {device.to_host / 1e9:g} GB/s beside the passes, a block ahead: what takes longer than its pass holds it up"
    ]


STAGES_OF_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""Pipeline stages on one rank, by the schedule. Copied from :data:`engine.strategies.pipeline.SCHEDULES`, whose import takes a second."""
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
    """The fraction of the step's time that a rank of the pipeline waits, if all stages take equally long.

    Args:
        schedule: a key of :data:`BUBBLE_FORMULAS`.
        ranks: ranks of the pipeline's axis.
        parts: parts of a micro-batch, ``num_microbatches``.
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
_OUTSIDE = "outside of the passes"
"""The key of everything outside of the passes."""
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
    """Sentences on what :func:`step_time` assumes about overlap."""
    return _NO_OVERLAP_ON_HOST if device.is_host else _OVERLAP


@dataclass(frozen=True, slots=True)
class TimedCollectives:
    """A rank's collectives of one kind, axis and phase, with the time that they take."""

    collective: Collective
    seconds: float
    overlaps: bool


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one rank's step."""

    compute: Compute
    sent: tuple[TimedCollectives, ...]
    exposed_s: float
    """Seconds of communication in the estimate that no computation hides."""
    bubble_s: float
    """Seconds in which the rank waits for other stages of the pipeline."""
    host_s: float
    """Seconds of transfers to and from the host's memory that no pass hides, and of the optimizer's step there."""
    offload_s: float
    """Seconds in :attr:`host_s` in which a pass waits for activations that cross the link to the host."""
    expected_s: float
    """The estimated seconds of the step: compute, exposed communication, the bubble and the host's memory."""
    best_s: float
    """Seconds of the step if all communication overlaps with the compute, without a bubble."""
    worst_s: float
    """Seconds of the step if no communication overlaps with the compute."""

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives, one after another."""
        return sum(sent.seconds for sent in self.sent)


def overlaps(collective: Collective) -> bool:
    """Whether a pass can run concurrently with ``collective``: with a gather of parameters, a reduction of gradients, or a send to the next stage it
    can."""
    if collective.kind == "send":
        return collective.phase in _PASSES
    if collective.axis in _WITHIN_LAYERS or collective.phase not in _PASSES:
        return False
    return collective.kind in ("all_gather", "reduce_scatter") or (
        collective.kind == "all_reduce" and collective.phase == "backward"
    )


def step_time(
    trace: RankTrace,
    device: Hardware,
    ranks_per_node: int,
    *,
    bubble: float = 0.0,
    tf32: bool = False,
    compiled: bool = False,
) -> StepTime:
    """The time of a rank's step.

    Args:
        trace: the trace of the rank's step.
        device: the rank's hardware.
        ranks_per_node: neighbouring ranks that share a node.
        bubble: the pipeline's share of waiting in the time of its passes.
        tf32, compiled: as in :func:`compute_time`.
    """
    sent = tuple(
        TimedCollectives(
            collective,
            collective_seconds(collective, device, ranks_per_node),
            trace.overlaps and overlaps(collective) and not device.is_host,
        )
        for collective in trace.collectives
    )
    parts = {
        phase: compute_time(
            (o for o in trace.operations if (o.phase if o.phase in _PASSES else _OUTSIDE) == phase),
            device,
            tf32=tf32,
            compiled=compiled,
        )
        for phase in (*_PASSES, _OUTSIDE)
    }
    passes = exposed = offload = 0.0
    crossing = offload_seconds(trace, device)
    for phase in _PASSES:
        computing = parts[phase].seconds
        hidden = [entry for entry in sent if entry.overlaps and entry.collective.phase == phase]
        unhidden = sum(entry.seconds for entry in sent if not entry.overlaps and entry.collective.phase == phase)
        unhidden += _uncovered(hidden, computing)
        passes += computing + unhidden
        exposed += unhidden
        offload += max(0.0, crossing.get(phase, 0.0) - computing - unhidden)
    outside_passes = sum(entry.seconds for entry in sent if entry.collective.phase not in _PASSES)
    total, outside_s = sum(parts.values(), Compute()), parts[_OUTSIDE].seconds
    waiting = passes * bubble / (1 - bubble)
    sending_s, host = sum(entry.seconds for entry in sent), host_seconds(trace, device) + offload
    return StepTime(
        compute=total,
        sent=sent,
        exposed_s=exposed + outside_passes,
        bubble_s=waiting,
        host_s=host,
        offload_s=offload,
        expected_s=passes + waiting + outside_s + outside_passes + host,
        best_s=total.seconds + sending_s if device.is_host else max(total.seconds, sending_s) + host,
        worst_s=total.seconds
        + sending_s
        + host
        + (total.seconds - outside_s + sending_s - outside_passes) * bubble / (1 - bubble),
    )


def _uncovered(hidden: Sequence[TimedCollectives], computing: float) -> float:
    """Seconds of the overlapping collectives ``hidden`` that a pass of ``computing`` seconds does not hide."""
    one_call_each_s = sum(entry.seconds / entry.collective.count for entry in hidden if entry.collective.count)
    return max(one_call_each_s, sum(entry.seconds for entry in hidden) - computing)
