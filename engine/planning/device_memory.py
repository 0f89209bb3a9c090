"""The memory that a rank needs on its device: a replay of torch's caching allocator, and margins."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.planning.device_table import Hardware
from engine.planning.rank_trace import Allocations, Collective, RankTrace

# c10/cuda/CUDACachingAllocator.cpp with its default settings, and "Memory management" in torch's CUDA notes.
_MIB = 2**20
BLOCK = 512
"""Bytes; the size of every block is a multiple."""
_SMALL = _MIB
"""Blocks up to this size come from segments of 2 MiB; the rest of a segment becomes another block."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
"""Blocks of at least this size have segments of their own, multiples of 2 MiB; smaller ones share segments of 20 MiB. If more than 1 MiB of a segment
is left, it becomes a block."""
_SHARED_SEGMENT = 20 * _MIB
_ROUND = 2 * _MIB
_STEPS = 5
"""The maximum number of steps after the first in which the allocator may settle; with enough room two suffice."""


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Peaks of a replayed allocator (bytes)."""

    allocated: int
    """Peak of the blocks, ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Peak of the segments, ``torch.cuda.max_memory_reserved``."""
    settled: bool
    """Whether the allocator took no new segment in one of the steps after the first."""


class OutOfMemory(Exception):
    """The tensors need more memory than the limit."""


def replay(allocations: Allocations, limit: int | None = None) -> AllocatorPeaks:
    """Replay some steps of ``allocations`` with an allocator that has reserved nothing yet.

    Args:
        limit: the maximum of bytes that the allocator may reserve.

    Raises:
        OutOfMemory: ``limit`` is not enough.
    """
    allocator = CachingAllocator(limit)
    blocks: dict[int, Block] = {}

    def step(events: Sequence[int]) -> bool:
        """Replay one step; return whether the allocator needed no new segment."""
        segments_before = allocator.segments_made
        for storage, size in zip(events[::2], events[1::2], strict=True):
            if (before := blocks.pop(storage, None)) is not None:
                allocator.free(before)
            if size:
                blocks[storage] = allocator.allocate(size, allocations.streams[storage])
        return allocator.segments_made == segments_before

    step(allocations.first)
    settled = any(step(allocations.again) for _ in range(_STEPS))
    return AllocatorPeaks(allocator.most_allocated, allocator.most_reserved, settled)


class Block:
    """A part of a segment, or a whole segment."""

    __slots__ = ("address", "after", "before", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool, before: Block | None, after: Block | None) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before, self.after = before, after

    @property
    def is_segment(self) -> bool:
        """Check whether the block is a whole segment."""
        return self.before is None and self.after is None


class _Pool:
    """The free blocks of one stream, for small tensors or for large ones."""

    __slots__ = ("_free", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self._free, (block.size, block.address, block))

    def remove(self, block: Block) -> bool:
        """Remove a block; returns whether it was free."""
        position = bisect_left(self._free, (block.size, block.address))
        if position == len(self._free) or self._free[position][2] is not block:
            return False
        del self._free[position]
        return True

    def take_smallest(self, size: int) -> Block | None:
        """Remove and return the smallest block of at least ``size`` bytes; ``None``: there is none."""
        position = bisect_left(self._free, (size,))
        return self._free.pop(position)[2] if position < len(self._free) else None

    def release(self) -> int:
        """Give the segments that are not in use back to the device, and return their bytes."""
        unused = sum(block.size for _, _, block in self._free if block.is_segment)
        self._free = [entry for entry in self._free if not entry[2].is_segment]
        return unused


class CachingAllocator:
    """Divides segments into blocks, and keeps segments when their tensors are gone: it decides as torch's allocator does, but allocates no memory."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._end = 0
        self.allocated = self.most_allocated = 0
        self.reserved = self.most_reserved = 0
        self.segments_made = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Return a block for a tensor of ``size`` bytes on ``stream``.

        Raises:
            OutOfMemory: the limit is not enough, even after all unused segments are given back.
        """
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.take_smallest(size) or self._segment(size, pool)
        spare = block.size - size
        if spare >= BLOCK if small else spare > _SMALL:
            remainder = Block(block.address + size, spare, pool, block, block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            pool.add(remainder)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block whose tensor is gone, and merge it with free neighbours."""
        self.allocated -= block.size
        pool, before, after = block.pool, block.before, block.after
        if after is not None and pool.remove(after):
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and pool.remove(before):
            before.size += block.size
            before.after = block.after
            if before.after is not None:
                before.after.before = before
            block = before
        pool.add(block)

    def _segment(self, size: int, pool: _Pool) -> Block:
        """Reserve a segment in which a block of ``size`` bytes has room, and return it as one block."""
        if pool.small:
            size = _SMALL_SEGMENT
        else:
            size = _SHARED_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
        if self._limit is not None and self.reserved + size > self._limit:
            self.reserved -= sum(unused.release() for unused in self._pools.values())
            if self.reserved + size > self._limit:
                raise OutOfMemory
        block = Block(self._end, size, pool, None, None)
        self._end += size
        self.segments_made += 1
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block


def rounded(size: int) -> int:
    """The size of the block for ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


MARGIN = 0.01
"""Fraction of the reserved memory, for what a trace does not see: workspaces of cuBLAS and cuDNN. More is not needed: if a real run allocates its
tensors in another order, the allocator can give back unused segments, some 5 % in the published runs of ``tests/planning/published.py``."""
NCCL_BYTES = 256 * 2**20
"""Bytes for each process group on a GPU: NCCL has 16 to 32 channels, each with buffers of 4 MiB for each protocol (NCCL_BUFFSIZE) at both ends."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a rank needs on its device."""

    tensors: int
    """Peak of the tensors, as traced."""
    rounded: int
    """The allocator's blocks for the tensors: ``max_memory_allocated``."""
    reserved: int
    """The allocator's segments, free blocks between others included: ``max_memory_reserved``."""
    margin: int
    context: int
    """The driver's context and kernels."""
    communicators: int
    """NCCL's buffers."""

    @property
    def total(self) -> int:
        """Segments, margin, context and communicators together."""
        return self.reserved + self.margin + self.context + self.communicators


def memory_need(trace: RankTrace, device: Hardware) -> Need:
    """Compute the memory need of a rank on ``device``; on a CPU nothing is rounded."""
    tensors = trace.peak.memory.total
    if not device.caching:
        return Need(tensors, tensors, tensors, 0, device.reserved, 0)
    communicators = NCCL_BYTES * len(
        {collective.ranks for collective in trace.collectives if len(collective.ranks) > 1}
    )
    room = int((device.memory - device.reserved - communicators) / (1 + MARGIN))
    replayed = _replay_within(trace, room) or replay(trace.allocations)
    margin = int(replayed.reserved * MARGIN)
    return Need(tensors, replayed.allocated, replayed.reserved, margin, device.reserved, communicators)


def _replay_within(trace: RankTrace, room: int) -> AllocatorPeaks | None:
    """Replay within ``room`` bytes, in which the allocator may have to give back unused segments.

    Return ``None`` if it would have to do so in every step, or if ``room`` is not enough.
    """
    with suppress(OutOfMemory):
        replayed = replay(trace.allocations, room)
        return replayed if replayed.settled else None
    return None


def is_enough(trace: RankTrace, device: Hardware) -> bool:
    """Check whether the device's memory is enough without margins, however often the allocator has to give back unused segments."""
    room = device.memory - device.reserved
    if not device.caching:
        return trace.peak.memory.total <= room
    with suppress(OutOfMemory):
        replay(trace.allocations, room)
        return True
    return False


def assumptions(device: Hardware, collectives: Iterable[Collective]) -> list[str]:
    """Sentences on what :func:`memory_need` assumes."""
    if not device.caching:
        return ["the CPU's allocator rounds nothing; the interpreter, libraries and data workers are not counted"]
    sentences = [
        "torch's caching allocator has its default settings; its segments are those that it takes for the tensors of some steps in the traced order",
        f"margin: {MARGIN:.0%} of the reserved memory for libraries' workspaces, {device.reserved / 2**30:.1f} GiB for the "
        "driver's context and kernels",
    ]
    if any(len(collective.ranks) > 1 for collective in collectives):
        sentences.append(f"margin: {NCCL_BYTES // 2**20} MiB of buffers for each process group of NCCL")
    sentences.append("what a compiled graph saves or needs besides is not counted")
    return sentences
