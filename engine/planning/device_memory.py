"""What a rank needs of its device's memory: torch's caching allocator replayed, and what comes on top."""

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
"""Every block is a multiple of it."""
_SMALL = _MIB
"""Blocks up to this size come from segments of 2 MiB, and what is left of a segment is another block."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
"""Blocks from here have segments of their own, multiples of 2 MiB; smaller ones share segments of 20 MiB. More than 1 MiB that is left is a block."""
_SHARED_SEGMENT = 20 * _MIB
_ROUND = 2 * _MIB
_STEPS = 5
"""After the first, until the allocator has settled: where there is room, two are enough."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the allocator has had at most (bytes)."""

    allocated: int
    """Blocks: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Segments: ``torch.cuda.max_memory_reserved``."""
    settled: bool
    """Whether it came to steps in which it gets no more from the device and gives nothing back."""


class OutOfMemory(Exception):
    """The tensors need more than the limit."""


def replay(allocations: Allocations, limit: int | None = None) -> Replayed:
    """What the allocator takes for some steps of ``allocations`` if it starts with nothing.

    Args:
        limit: bytes that it can reserve.

    Raises:
        OutOfMemory: ``limit`` does not suffice.
    """
    allocator = CachingAllocator(limit)
    blocks: dict[int, Block] = {}

    def step(events: Sequence[int]) -> bool:
        """Whether the allocator had what it needed."""
        calls = allocator.segments_made
        for storage, size in zip(events[::2], events[1::2], strict=True):
            if (before := blocks.pop(storage, None)) is not None:
                allocator.free(before)
            if size:
                blocks[storage] = allocator.allocate(size, allocations.streams[storage])
        return allocator.segments_made == calls

    step(allocations.first)
    settled = any(step(allocations.again) for _ in range(_STEPS))
    return Replayed(allocator.most_allocated, allocator.most_reserved, settled)


class Block:
    """A part of a segment."""

    __slots__ = ("address", "after", "before", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool, before: Block | None, after: Block | None) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before, self.after = before, after

    @property
    def whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.before is None and self.after is None


class _Pool:
    """The free blocks of one stream for small tensors, or for large ones."""

    __slots__ = ("_free", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self._free: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self._free, (block.size, block.address, block))

    def remove(self, block: Block) -> bool:
        """Whether it was free."""
        at = bisect_left(self._free, (block.size, block.address))
        if at == len(self._free) or self._free[at][2] is not block:
            return False
        del self._free[at]
        return True

    def take(self, size: int) -> Block | None:
        """The smallest block that is large enough."""
        at = bisect_left(self._free, (size,))
        return self._free.pop(at)[2] if at < len(self._free) else None

    def release(self) -> int:
        """Give back the segments that nothing uses; returns their bytes."""
        unused = sum(block.size for _, _, block in self._free if block.whole)
        self._free = [entry for entry in self._free if not entry[2].whole]
        return unused


class CachingAllocator:
    """Blocks in segments, which it keeps when their tensors are gone: the same decisions as torch's, and no memory."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._end = 0
        self.allocated = self.most_allocated = 0
        self.reserved = self.most_reserved = 0
        self.segments_made = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block for a tensor of ``size`` bytes on a stream.

        Raises:
            OutOfMemory: nor do the segments help that it could give back.
        """
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.take(size) or self._segment(size, pool)
        left = block.size - size
        if left >= BLOCK if small else left > _SMALL:
            rest = Block(block.address + size, left, pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            pool.add(rest)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """The block's tensor is gone; free neighbours become one block."""
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
        if pool.small:
            size = _SMALL_SEGMENT
        else:
            size = _SHARED_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
        if self._limit is not None and self.reserved + size > self._limit:
            self.reserved -= sum(each.release() for each in self._pools.values())
            if self.reserved + size > self._limit:
                raise OutOfMemory
        block = Block(self._end, size, pool, None, None)
        self._end += size
        self.segments_made += 1
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block


def rounded(size: int) -> int:
    """Bytes of the block for ``size`` bytes."""
    return -(-size // BLOCK) * BLOCK


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
