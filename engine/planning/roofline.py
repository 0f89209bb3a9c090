"""Seconds of a rank's operations: each takes the longest of its arithmetic, its memory traffic and its start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import WRAPPED, Operation

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


def compute(
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


def assumptions(device: Hardware, *, tf32: bool, compiled: bool) -> list[str]:
    """What :func:`compute` assumes, a sentence each."""
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
