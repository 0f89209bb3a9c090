"""Seconds that a step takes because parameters, gradients or optimizer state are in the host's memory."""

from __future__ import annotations

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import RankTrace

_PARAMETERS, _STATE = "parameters", "optimizer_state"


def seconds(trace: RankTrace, device: Hardware) -> float:
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


def assumptions(trace: RankTrace, device: Hardware) -> list[str]:
    """What :func:`seconds` assumes, a sentence each."""
    if not trace.on_host or device.is_host:
        return []
    return [
        f"in the host's memory: {', '.join(trace.on_host)}; they cross a link of {device.to_host / 1e9:g} GB/s, and the host's optimizer moves "
        f"{device.host_memory / 1e9:g} GB/s for each device; nothing runs beside either"
    ]
