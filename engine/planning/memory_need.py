"""What a rank needs of its device's memory: what the allocator takes for its tensors, and what comes on top."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from engine.planning.caching_allocator import OutOfMemory, Replayed, replay
from engine.planning.device_table import Hardware
from engine.planning.rank_trace import Collective, RankTrace

MARGIN = 0.01
"""Of the reserved memory, for what no trace sees: workspaces of cuBLAS and cuDNN. More is not needed: where the tensors come in another order than in
the trace, the allocator can give back what it keeps unused, some 5 % in the published runs of ``tests/planning/published.py``."""
NCCL_BYTES = 256 * 2**20
"""Of each process group on a GPU: NCCL's channels have buffers of 4 MiB for each protocol (NCCL_BUFFSIZE), 16 to 32 channels, at both ends."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a rank needs on its device."""

    tensors: int
    """The peak, as traced."""
    rounded: int
    """The allocator's blocks for them: ``max_memory_allocated``."""
    reserved: int
    """Its segments, free blocks between others included: ``max_memory_reserved``."""
    margin: int
    context: int
    """The driver's context and kernels."""
    communicators: int
    """NCCL's buffers."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.reserved + self.margin + self.context + self.communicators


def need(trace: RankTrace, device: Hardware) -> Need:
    """Of a rank on ``device``; on a CPU nothing is rounded."""
    tensors = trace.peak.memory.total
    if not device.caching:
        return Need(tensors, tensors, tensors, 0, device.reserved, 0)
    communicators = NCCL_BYTES * len({each.ranks for each in trace.collectives if len(each.ranks) > 1})
    room = int((device.memory - device.reserved - communicators) / (1 + MARGIN))
    found = _settled(trace, room) or replay(trace.allocations)
    margin = int(found.reserved * MARGIN)
    return Need(tensors, found.allocated, found.reserved, margin, device.reserved, communicators)


def _settled(trace: RankTrace, room: int) -> Replayed | None:
    """The allocator within ``room``, where it may have to give back what it does not use; ``None``: again and again, or it is not enough."""
    with suppress(OutOfMemory):
        found = replay(trace.allocations, room)
        return found if found.settled else None
    return None


def suffices(trace: RankTrace, device: Hardware) -> bool:
    """Whether the device's memory is enough without margins, however often the allocator gives back what it does not use."""
    room = device.memory - device.reserved
    if not device.caching:
        return trace.peak.memory.total <= room
    with suppress(OutOfMemory):
        replay(trace.allocations, room)
        return True
    return False


def assumptions(device: Hardware, collectives: Iterable[Collective]) -> list[str]:
    """What :func:`need` assumes, a sentence each."""
    if not device.caching:
        return ["the CPU's allocator rounds nothing; the interpreter, libraries and data workers are not counted"]
    found = [
        "torch's caching allocator has its default settings; its segments are those that it takes for the tensors of some steps in the traced order",
        f"margin: {MARGIN:.0%} of the reserved memory for libraries' workspaces, {device.reserved / 2**30:.1f} GiB for the "
        "driver's context and kernels",
    ]
    if any(len(each.ranks) > 1 for each in collectives):
        found.append(f"margin: {NCCL_BYTES // 2**20} MiB of buffers for each process group of NCCL")
    found.append("what a compiled graph saves or needs besides is not counted")
    return found
