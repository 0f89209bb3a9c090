"""What torch's caching allocator reserves on a GPU for a set of tensors, and what a device must have besides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.planning.devices import Hardware
from engine.planning.rank_trace import Collective, RankTrace

# c10/cuda/CUDACachingAllocator.cpp, and "Memory management" in torch's CUDA notes.
_MIB = 2**20
BLOCK = 512
"""Every block is a multiple of it."""
_SMALL = _MIB
"""Blocks up to this size come from segments of 2 MiB."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
"""Blocks from here have segments of their own, multiples of 2 MiB; smaller ones share segments of 20 MiB."""
_SHARED_SEGMENT = 20 * _MIB
_ROUND = 2 * _MIB
FRAGMENTATION = 0.05
"""Of the reserved memory, for free blocks between others. It is little: before the allocator gives up it returns segments that nobody uses."""
NCCL_BYTES = 256 * _MIB
"""Of each process group on a GPU: NCCL's channels have buffers of 4 MiB for each protocol (NCCL_BUFFSIZE), 16 to 32 channels, at both ends."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a rank needs on its device."""

    tensors: int
    """The peak, as traced."""
    rounded: int
    """Blocks: the allocator's ``memory_allocated``."""
    segments: int
    """Segments that hold these blocks: ``memory_reserved``, without fragmentation."""
    fragmentation: int
    context: int
    """The driver's context and kernels."""
    communicators: int
    """NCCL's buffers."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.segments + self.fragmentation + self.context + self.communicators


def block(size: int) -> int:
    """Bytes of the block for a tensor's storage."""
    return max(BLOCK, -(-size // BLOCK) * BLOCK) if size else 0


def segments(storages: Iterable[tuple[int, int]]) -> int:
    """Bytes of the segments that hold storages of these sizes: ``(bytes, how many)``."""
    small = middle = large = 0
    for size, count in storages:
        rounded = block(size)
        if rounded <= _SMALL:
            small += rounded * count
        elif rounded < _LARGE:
            middle += rounded * count
        else:
            large += -(-rounded // _ROUND) * _ROUND * count
    return -(-small // _SMALL_SEGMENT) * _SMALL_SEGMENT + -(-middle // _SHARED_SEGMENT) * _SHARED_SEGMENT + large


def need(trace: RankTrace, device: Hardware) -> Need:
    """Of a rank on ``device``; on a CPU nothing is rounded."""
    tensors = trace.peak.memory.total
    if not device.caching:
        return Need(tensors, tensors, tensors, 0, device.reserved, 0)
    known = trace.storages_at_peak
    # What a formula has added to the trace has no storages.
    rest = max(0, tensors - sum(size * count for size, count in known))
    rounded = sum(block(size) * count for size, count in known) + rest
    reserved = segments(known) + -(-rest // _ROUND) * _ROUND
    groups = {each.ranks for each in trace.collectives if len(each.ranks) > 1}
    return Need(tensors, rounded, reserved, int(reserved * FRAGMENTATION), device.reserved, len(groups) * NCCL_BYTES)


def assumptions(device: Hardware, collectives: Iterable[Collective]) -> list[str]:
    """What :func:`need` assumes, a sentence each."""
    if not device.caching:
        return ["the CPU's allocator rounds nothing; the interpreter, libraries and data workers are not counted"]
    found = [
        "torch's caching allocator rounds each tensor to 512 bytes, in segments of 2 MiB (up to 1 MiB), 20 MiB (up to 10 MiB) or their own",
        f"margin: {FRAGMENTATION:.0%} of the segments for fragmentation, {device.reserved / 2**30:.1f} GiB for the driver's context and kernels",
    ]
    if any(len(each.ranks) > 1 for each in collectives):
        found.append(f"margin: {NCCL_BYTES // _MIB} MiB of buffers for each process group of NCCL")
    found.append(
        "memory that libraries take by themselves (cuBLAS and cuDNN workspaces, compiled graphs) is not counted"
    )
    return found
