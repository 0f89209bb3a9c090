"""A source is read pass by pass, also if it changes its size within one: against a set of what has been read."""

from __future__ import annotations

import random

import pytest

from engine.data.source_order import COMPUTED_FROM, SourceOrder


def test_passes_are_permutations_small_ones_stored_and_large_ones_computed() -> None:
    order = SourceOrder([(0, 50)], 7, True)
    passes = [order.read(start, start + 50).tolist() for start in (0, 50, 100)]
    assert [sorted(numbers) for numbers in passes] == [list(range(50))] * 3
    assert passes[0] != passes[1] != passes[2]
    assert order.read(40, 110).tolist() == [*passes[0][40:], *passes[1], *passes[2][:10]]
    size = COMPUTED_FROM + 5
    large = SourceOrder([(0, size)], 7, True)
    numbers = large.read(0, size + 20).tolist()
    assert sorted(numbers[:size]) == list(range(size))
    assert len(set(numbers[size:])) == 20
    for low, high in ((8180, 8200), (size - 30, size + 20)):
        assert SourceOrder([(0, size)], 7, True).read(low, high).tolist() == numbers[low:high]


def test_a_large_source_that_has_shrunk_far_from_its_pass_s_end_begins_a_new_one() -> None:
    order = SourceOrder([(0, 10**9), (100, 10**8)], 7, True)
    assert order.cut
    numbers = order.read(100, 3000).tolist()
    assert max(numbers) < 10**8
    assert len(set(numbers)) == 2900


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_that_changes_its_size_reads_what_is_left_of_its_pass(shuffle: bool) -> None:
    chance = random.Random(4)
    for _ in range(60):
        sizes = [(0, chance.randint(1, 30))]
        for _ in range(chance.randint(1, 3)):
            sizes.append((sizes[-1][0] + chance.randint(0, 40), max(1, sizes[-1][1] + chance.choice([-9, 0, 5, 12]))))
        order = SourceOrder(sizes, 7, shuffle)
        numbers = order.read(0, 200).tolist()
        assert [int(order.read(k, k + 1)[0]) for k in range(200)] == numbers
        # A pass by hand: what has been read of it, against what there was.
        seen: set[int] = set()
        for draw, number in enumerate(numbers):
            size = [size for count, size in sizes if count <= draw][-1]
            seen = {entry for entry in seen if entry < size}
            if len(seen) == size:
                seen = set()
            assert number < size
            assert number not in seen
            seen.add(number)
            if len(seen) == size:
                seen = set()
