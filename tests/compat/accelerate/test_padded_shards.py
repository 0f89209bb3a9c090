"""Samples dealt out with padding; the expected lists are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, IterableDataset

from engine.compat.accelerate.padded_shards import BatchSamplerShard, IterableDatasetShard


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


def shards(length: int, batch_size: int, drop_last: bool = False, **options: bool) -> list[Any]:
    """The batches of each of two processes; their number is as announced."""
    found = []
    for rank in range(2):
        shard = BatchSamplerShard(BatchSampler(range(length), batch_size, drop_last), 2, rank, **options)
        found.append(list(shard))
        assert len(shard) == len(found[-1])
    return found


def test_the_last_step_is_filled_up_from_the_first() -> None:
    assert shards(7, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert shards(3, 1) == [[[0], [2]], [[1], [0]]]
    assert shards(1, 2) == [[[0, 0]], [[0, 0]]]
    assert shards(6, 4, split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]


def test_without_filling_up() -> None:
    assert shards(7, 2, even_batches=False) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert shards(3, 1, even_batches=False) == [[[0], [2]], [[1]]]
    assert shards(7, 2, drop_last=True) == [[[0, 1]], [[2, 3]]]


def test_batches_of_different_sizes() -> None:
    sampler: Any = BatchSampler(range(0), 2, False)
    shard = BatchSamplerShard(sampler, 2, 0)
    shard.batch_sampler = [[0], [1, 2], [3]]
    with pytest.raises(ValueError, match="different sizes"):
        list(shard)
    shard.even_batches = False
    assert list(shard) == [[0], [3]]
    with pytest.raises(ValueError, match="multiple of 2 processes"):
        BatchSamplerShard(BatchSampler(range(4), 3, False), 2, 0, split_batches=True)


def test_streams() -> None:
    def dealt(length: int, **options: Any) -> list[list[int]]:
        return [list(IterableDatasetShard(Numbers(length), 2, False, 2, rank, **options)) for rank in range(2)]

    assert dealt(7) == [[0, 1, 4, 5], [2, 3, 6, 0]]
    assert dealt(3, split_batches=True) == [[0, 2], [1, 0]]
    assert list(IterableDatasetShard(Numbers(7), 2, True, 2, 1)) == [2, 3]
