"""Batch sizes that shrink until one fits into memory."""

from __future__ import annotations

import pytest

from engine.utils.batch_sizes import find_executable_batch_size


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
