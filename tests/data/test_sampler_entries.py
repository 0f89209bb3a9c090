"""What a user's sampler yields comes back as it was, and its checksum is that of a list: both against the list itself."""

from __future__ import annotations

import pickle
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.sampler_entries import collected


@pytest.mark.parametrize("entry", [2**70, None, (3, 4), "x", np.float64(2.5), torch.tensor(1.0), np.uint64(2**63), [1]])
@pytest.mark.parametrize("place", [0, 1, 8191, 8192, 9000])
def test_an_entry_of_another_type_among_integers(entry: Any, place: int) -> None:
    expected = [*range(place), entry, *range(3000)]
    entries = collected(iter(expected))
    assert list(entries) == expected == entries[:]
    assert [type(index) for index in entries] == list(map(type, expected))
    assert entries[place] is entry


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("index", [int, np.int64, torch.tensor])
def test_batches_of_unequal_sizes_are_kept_in_arrays(kind: Any, index: Any) -> None:
    chance = random.Random(3)
    sizes = [chance.randint(0, 9) for _ in range(500)]
    numbers = iter(range(10_000))
    expected = [kind(index(next(numbers)) for _ in range(size)) for size in sizes]
    entries = collected(expected)
    assert list(entries) == expected == entries[:]
    assert [type(i) for batch in entries for i in batch] == [type(i) for batch in expected for i in batch]
    assert [entries.size_of(number) for number in range(500)] == sizes
    assert entries.size_of(-1) == sizes[-1]
    assert entries[-7:] == expected[-7:]
    assert len(pickle.dumps(entries)) < 8 * (sum(sizes) + 500) + 1000
    changed = collected([*expected[:-1], kind(index(1) for _ in range(10))])
    assert changed.checksum() != entries.checksum()
    # Other bounds of the same indices, and other types among them.
    flat = [i for batch in expected for i in batch]
    assert collected([kind(flat)]).checksum() != entries.checksum()
    assert list(collected([*expected, kind("ab"), 4, []])) == [*expected, kind("ab"), 4, []]
    assert list(collected([kind(), kind(), kind((2,))])) == [kind(), kind(), kind((2,))]


@pytest.mark.parametrize(
    "order",
    [[3, 1, 2], [[1, 2], [3, 4]], [[1, 2], [3], []], [(1, 2), (3,)], ["a", "b"], [np.int64(3), np.int64(4)], []],
)
def test_checksums_are_those_of_earlier_checkpoints(order: list[Any]) -> None:
    try:
        saved = zlib.crc32(torch.tensor(order, dtype=torch.int64).numpy().tobytes())
    except (TypeError, ValueError, RuntimeError):
        saved = zlib.crc32(repr(order).encode())
    entries = collected(order)
    assert entries.has_checksum(saved)
    assert entries.has_checksum(entries.checksum())
    assert not collected([*order, *order[:1], *order]).has_checksum(saved) or not order


def test_orders_without_a_common_index_are_found() -> None:
    evens, odds = collected(range(0, 5000, 2)), collected(range(1, 5000, 2))
    assert evens.is_disjoint(odds)
    assert not evens.is_disjoint(collected(["a", 4]))
    assert evens.is_disjoint(collected([[1, 3], [5]]))
    assert not evens.is_disjoint(collected([{"a": 4}]))
