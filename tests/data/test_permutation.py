"""Permutations that are computed: a bijection for every size, spread evenly, the same wherever they are entered, at no cost for any size."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch
from support.internals import new_deal
from torch.utils.data import DataLoader, Dataset, RandomSampler

from engine import Engine
from engine.data import permutation as permutations
from engine.data.permutation import Permutation
from engine.data.sampler import permutation

WRITTEN_DOWN = [2345913078, 9916892431, 2344231012]
SMALL = [*range(18), 63, 64, 65, 1000, 4097, 65537]


@pytest.mark.parametrize("seed", [0, 12345])
def test_every_number_comes_once(seed: int) -> None:
    for size in SMALL:
        assert sorted(Permutation(size, seed, 2)[:]) == list(range(size))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(Permutation(40, seed, epoch)[:]) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert Permutation(40, 3, 4)[:] == Permutation(40, 3, 4)[:]


def test_the_numbers_of_today_are_those_of_tomorrow() -> None:
    """A checkpoint's order must not change with a version or a platform: written down when it was made, and computed again by hand below."""
    for size in (1000, 2**24 + 3, 10**10):
        assert Permutation(size, 7, 1)[:5] == by_python(size, 7, 1, 5)
    assert Permutation(10**10, 7, 1)[:3] == WRITTEN_DOWN


def by_python(size: int, seed: int, epoch: int, count: int) -> list[int]:
    """The same network with Python's integers."""

    def mix(a: int, b: int) -> int:
        z = (a * 0x9E3779B97F4A7C15 + b * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) >> 1

    def scramble(half: int, key: int) -> int:
        x = half ^ key
        x = (x ^ x >> 15) * 0x2C1B3C6D % 2**32
        x = (x ^ x >> 12) * 0x297A2D39
        return x ^ x >> 15

    bits = (size - 1).bit_length()
    low_bits, keys = bits // 2, [mix(mix(seed, epoch), i) % 2**32 for i in range(8 if bits >= 16 else 16)]

    def once(number: int) -> int:
        high, low = number >> low_bits, number % 2**low_bits
        for i, key in enumerate(keys):
            if i % 2:
                low ^= scramble(high, key) % 2**low_bits
            else:
                high ^= scramble(low, key) % 2 ** (bits - low_bits)
        return (high << low_bits) + low

    found = []
    for place in range(count):
        number = once(place)
        while number >= size:
            number = once(number)
        found.append(number)
    return found


@pytest.mark.parametrize(("size", "seeds", "bound"), [(4, 480, 55.0), (5, 1200, 185.0)])
def test_all_permutations_are_equally_likely(size: int, seeds: int, bound: float) -> None:
    """Chi-square over the 24 or 120 permutations: means of 23 and 119, deviations of 6.8 and 15.4; the bounds are 4 deviations away and more."""
    counts = Counter(tuple(Permutation(size, seed, 0)[:]) for seed in range(seeds))
    every = list(itertools.permutations(range(size)))
    expected = seeds / len(every)
    assert sum((counts[each] - expected) ** 2 / expected for each in every) < bound


def test_places_and_neighbours_of_a_large_one_are_even() -> None:
    """2**16 entries of a permutation of 2**24 + 5 numbers: 256 classes of values, and of differences of neighbours.

    Chi-square with 255 degrees of freedom: mean 255, deviation 22.6; from 150 to 360 are more than 4.5 deviations.
    """
    size = 2**24 + 5
    for seed, start in ((1, 0), (2, 2**23), (3, size - 2**16)):
        values = Permutation(size, seed, 0).at(torch.arange(start, start + 2**16))
        for numbers in (values, (values[1:] - values[:-1]) % size, (values[1::2] ^ values[::2]) % 2**24):
            counts = torch.bincount(numbers * 256 // size if int(numbers.max()) < size else numbers, minlength=256)[
                :256
            ].double()
            expected = len(numbers) / 256
            assert 150 < ((counts - expected) ** 2 / expected).sum() < 360


def test_slices_and_pieces_are_the_same_entries() -> None:
    order = Permutation(2**24 + 1, 5, 3)
    whole = order[100:2148]
    assert [order[i] for i in (100, 117, 2147)] == [whole[0], whole[17], whole[2047]]
    assert order[-1] == order[2**24]
    deal = new_deal(len(order), 16, 2, 2, 1)
    pieces = list(itertools.islice(order.pieces(deal.windows(64)), 300))
    expected = [order[low : low + 16] for low in itertools.islice(itertools.count(64 + 16, 32), 300)]
    assert pieces == expected
    short = new_deal(9, 4, 1, 2, 0)
    assert list(Permutation(9, 1, 1).pieces(short.windows())) == [Permutation(9, 1, 1)[0:4], Permutation(9, 1, 1)[8:9]]


@pytest.mark.parametrize(("size", "count"), [(-1, None), (2**62 + 1, None), (5, 6)])
def test_impossible_sizes(size: int, count: int | None) -> None:
    with pytest.raises(ValueError, match=f"a permutation of {size} numbers"):
        Permutation(size, 0, 0, count)


# -- in a loader -------------------------------------------------------------------------------------------------------------------


class Huge(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


def prepared(size: int, seed: int = 7, **options: Any) -> Any:
    return Engine(accelerator="cpu", seed=seed).prepare_data_loader(
        DataLoader(Huge(size), **{"batch_size": 4, "shuffle": True, **options})
    )


def test_ten_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    loader = prepared(10**10)
    first = next(iter(loader)).tolist()
    loader.resume(3, 10**10 - 8)
    last = [batch.tolist() for batch in loader]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first == by_python(10**10, 7, 0, 4)
    assert [i for batch in last for i in batch] == Permutation(10**10, 7, 3)[10**10 - 8 :]
    assert peak < 8 * 2**20
    assert len(loader) == 25 * 10**8


def test_a_few_samples_of_many() -> None:
    loader = prepared(10**10, sampler=RandomSampler(Huge(10**10), num_samples=10), shuffle=None)
    found = [i for batch in loader for i in batch.tolist()]
    assert found == by_python(10**10, 7, 0, 10)


def test_without_batching() -> None:
    assert [int(i) for i in itertools.islice(prepared(10**10, batch_size=None), 3)] == by_python(10**10, 7, 0, 3)


def test_a_resume_continues_the_kind_of_order_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(loader: Any) -> list[int]:
        return [i for batch in loader for i in batch.tolist()]

    listed = permutation(100, 7, 0).tolist()
    before = prepared(100)
    assert flat(before) == listed  # below the size nothing has changed
    before.resume(0, 8)
    state = before.state_dict()
    assert "order" not in state  # as it was saved when there was no other order
    monkeypatch.setattr(permutations, "LARGE", 100)
    computed = prepared(100)
    assert flat(computed) == Permutation(100, 7, 0)[:]
    computed.resume(0, 8)
    assert computed.state_dict()["order"] == "feistel"
    old, new = prepared(100), prepared(100)
    old.load_state_dict(state)
    new.load_state_dict(computed.state_dict())
    assert flat(old) == listed[8:]
    assert flat(old) == permutation(100, 7, 1).tolist()  # for the rest of the run
    assert flat(new) == Permutation(100, 7, 0)[8:]
    assert "order" not in old.state_dict()
    with pytest.raises(ValueError, match="unknown kind 'other'"):
        new.load_state_dict({**state, "order": "other"})
