"""Seconds of a rank's step: compute and communication, what overlaps, and where a pipeline waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.planning import host_offload
from engine.planning.device_table import Hardware
from engine.planning.network import seconds
from engine.planning.rank_trace import Collective, RankTrace
from engine.planning.roofline import Compute, compute

_WITHIN_LAYERS = ("tp", "cp", "pp", "ep")
_PASSES = ("forward", "backward")
_ASSUMPTIONS = (
    "overlap: FSDP's gathers run beside the forward and the backward pass, its scatters and DDP's reductions beside the backward pass; DeepSpeed's "
    "only with overlap_comm, which is its default at stage 3; of the calls of one kind in a pass, one (the first gather, the last reduction) has "
    "nothing to run beside",
    "no overlap: collectives of tensor and context parallel, transfers between stages, broadcasts, and what the optimizer's step sends (norms)",
    "collectives that overlap take no compute units and no memory bandwidth from the pass",
)
_ON_HOST = (
    "no overlap: the processor that computes also sends",
    "ranks are equally fast; that those which share a core wait for the slowest of them at each collective is not counted",
)


def assumptions(device: Hardware) -> tuple[str, ...]:
    """What :func:`step_time` assumes, a sentence each."""
    return _ON_HOST if device.is_host else _ASSUMPTIONS


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
        tf32, compiled: as in :func:`engine.planning.roofline.compute`.
    """
    sent = tuple(
        Sent(each, seconds(each, device, ranks_per_node), trace.overlaps and overlaps(each) and not device.is_host)
        for each in trace.collectives
    )
    parts = {
        inside: compute(
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
    sending, host = sum(each.seconds for each in sent), host_offload.seconds(trace, device)
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
