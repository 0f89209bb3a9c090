"""Batch sizes that shrink until one fits into memory."""

from __future__ import annotations

import pytest

from engine.compat.accelerate.utils.memory import find_executable_batch_size, is_out_of_memory


def test_batch_sizes_shrink_until_one_fits() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, word: str) -> str:
        tried.append(batch_size)
        if batch_size > 75:
            raise RuntimeError("CUDA out of memory.")
        return f"{word} {batch_size}"

    assert train("fits") == "fits 72"
    assert tried == [100, 90, 81, 72]

    @find_executable_batch_size
    def wrong(batch_size: int) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        wrong()


def test_what_says_that_memory_is_exhausted() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
    )
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("a bug"))
