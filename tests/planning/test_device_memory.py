"""The decisions of torch's caching allocator, by hand from its documented sizes. ``tests/gpu/test_reserved_memory.py`` compares with the real one."""

from __future__ import annotations

import pytest

from engine.planning.device_memory import CachingAllocator, OutOfMemory, replay
from engine.planning.rank_trace import Allocations

MIB = 2**20


def taken(*sizes: int) -> tuple[int, int]:
    """Bytes of blocks and of segments for these tensors."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    return allocator.allocated, allocator.reserved


def test_blocks_and_segments() -> None:
    assert taken(1) == (512, 2 * MIB)
    assert taken(512, 513) == (1536, 2 * MIB)
    assert taken(*[512] * 4096) == (2 * MIB, 2 * MIB)
    assert taken(*[512] * 4097) == (2 * MIB + 512, 4 * MIB)
    assert taken(MIB + 1) == (MIB + 512, 20 * MIB)
    assert taken(*[5 * MIB] * 4) == (20 * MIB, 20 * MIB)
    assert taken(*[5 * MIB] * 5) == (25 * MIB, 40 * MIB)
    assert taken(10 * MIB) == (10 * MIB, 10 * MIB)
    assert taken(11 * MIB, 11 * MIB) == (24 * MIB, 24 * MIB)  # the last MiB is too little for another block


def test_the_smallest_free_block_that_is_large_enough_is_split() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * MIB), allocator.allocate(60 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(50 * MIB)  # of the 60
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 160 * MIB
    allocator.allocate(10 * MIB)  # what was left
    assert allocator.reserved == 160 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(100 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(25 * MIB) for _ in range(4)]
    assert allocator.reserved == 100 * MIB
    for part in (parts[0], parts[2], parts[3], parts[1]):
        allocator.free(part)
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 100 * MIB


def test_a_part_in_use_keeps_a_whole_segment_from_large_tensors() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(60 * MIB)
    allocator.allocate(100 * MIB)
    assert (allocator.allocated, allocator.reserved) == (160 * MIB, 200 * MIB)


def test_streams_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB, stream=1))
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 200 * MIB
    allocator.allocate(100 * MIB, stream=1)
    assert allocator.reserved == 200 * MIB


def test_small_and_large_tensors_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved == 22 * MIB


def test_unused_segments_go_back_before_the_memory_is_over() -> None:
    allocator = CachingAllocator(limit=250 * MIB)
    allocator.free(allocator.allocate(100 * MIB))
    used = allocator.allocate(200 * MIB)
    assert (allocator.reserved, allocator.most_reserved) == (200 * MIB, 200 * MIB)
    allocator.free(used)
    allocator.allocate(MIB * 3 // 2)  # a part of it is in use
    with pytest.raises(OutOfMemory):
        allocator.allocate(200 * MIB)


def test_steps_are_replayed_until_they_need_nothing() -> None:
    # 0 is there all the time; the first step leaves 2 behind in the place of 1, which needs another segment in the second.
    allocations = Allocations((0, 10 * MIB, 1, 40 * MIB, 1, 0, 2, 20 * MIB), (1, 40 * MIB, 1, 0), (0, 0, 0))
    found = replay(allocations)
    assert (found.allocated, found.reserved, found.settled) == (70 * MIB, 90 * MIB, True)
    assert replay(allocations, 90 * MIB) == found
    with pytest.raises(OutOfMemory):
        replay(allocations, 89 * MIB)


def test_steps_that_give_memory_back_each_time_do_not_settle() -> None:
    by_turns = (0, 40 * MIB, 0, 0, 1, 60 * MIB, 1, 0)
    allocations = Allocations(by_turns, by_turns, (0, 1))
    assert replay(allocations).settled
    found = replay(allocations, 80 * MIB)
    assert (found.reserved, found.settled) == (60 * MIB, False)


def test_nothing_takes_nothing() -> None:
    found = replay(Allocations())
    assert (found.allocated, found.reserved, found.settled) == (0, 0, True)
