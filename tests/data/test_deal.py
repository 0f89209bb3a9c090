"""Who trains on which sample: every sample once, weighed as in one big batch."""

from __future__ import annotations

from fractions import Fraction

import pytest

from engine.data.deal import Deal
from engine.step.position import shares


def dealt(deal: Deal, start: int = 0) -> list[list[list[int]]]:
    """``[window][micro-batch]`` positions of one rank."""
    return [[list(part) for part in own] for own, _ in deal.windows(start)]


def test_nineteen_samples_on_one_rank() -> None:
    deal = Deal(19, 4, window=2)
    assert dealt(deal) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18]],
    ]
    assert (len(deal), deal.steps, deal.used) == (5, 3, 19)


def test_nineteen_samples_on_two_ranks() -> None:
    # Global batch 0 is 0..15; the rest, 16 to 18, is split 2 and 1.
    assert dealt(Deal(19, 4, 2, 2, 0)) == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[16, 17]]]
    assert dealt(Deal(19, 4, 2, 2, 1)) == [[[4, 5, 6, 7], [12, 13, 14, 15]], [[18]]]


def test_nineteen_samples_on_three_ranks() -> None:
    # One short global batch of 19: parts of 7, 6 and 6, and each round a stretch of the order.
    assert dealt(Deal(19, 4, 2, 3, 0)) == [[[0, 1, 2, 3], [12, 13, 14]]]
    assert dealt(Deal(19, 4, 2, 3, 1)) == [[[4, 5, 6, 7], [15, 16]]]
    assert dealt(Deal(19, 4, 2, 3, 2)) == [[[8, 9, 10, 11], [17, 18]]]


@pytest.mark.parametrize(("world_size", "used"), [(1, 16), (2, 16), (3, 12)])
def test_drop_last_drops_what_fills_no_micro_batch_of_all(world_size: int, used: int) -> None:
    deal = Deal(19, 4, 2, world_size, 0, drop_last=True)
    assert deal.used == used
    assert {len(part) for own, _ in deal.windows() for part in own} == {4}


def test_a_rank_without_samples_repeats_some() -> None:
    deal = Deal(2, 4, 1, 3, 2)
    assert dealt(deal) == [[[0]]]
    ((_, every),) = deal.windows()
    assert [list(part) for part in every[0]] == [[0], [1], []]
    assert shares(((1, 1, 0),), 2)[0].size == 0


@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 100])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("units", "batch"), [(1, 4), (7, 1), (19, 4), (24, 4), (29, 3)])
def test_every_sample_once_with_its_weight(
    units: int, batch: int, world_size: int, window: int, drop_last: bool, limit: int | None
) -> None:
    deals = [Deal(units, batch, window, world_size, rank, drop_last, limit) for rank in range(world_size)]
    used = units // (batch * world_size) * batch * world_size if drop_last else units
    used = used if limit is None else min(used, limit * batch * world_size)
    count = 0
    for windows in zip(*(deal.windows() for deal in deals), strict=True):
        own, every = [w[0] for w in windows], windows[0][1]
        assert len({len(parts) for parts in own}) == 1  # equally many forward passes on each rank
        assert len(own[0]) <= window
        sizes = tuple(tuple(map(len, micro)) for micro in every) or ((batch,) * world_size,) * len(own[0])
        total = sum(map(sum, sizes))
        weights: dict[int, Fraction] = {}
        for rank, parts in enumerate(own):
            for part, share in zip(parts, shares(sizes, rank), strict=True):
                assert len(part) <= batch
                if share.size:
                    assert share.size == len(part)
                    for position in part:
                        assert position not in weights
                        # (mean over the part) / divisor, averaged over the ranks
                        weights[position] = 1 / (
                            Fraction(len(part)) * Fraction(share.divisor).limit_denominator(10**6) * world_size
                        )
            assert [share.last for share in shares(sizes, rank)] == [False] * (len(parts) - 1) + [True]
        assert sorted(weights) == list(range(count, count + total))
        assert set(weights.values()) == {Fraction(1, total)}
        count += total
    assert count == used
    assert {len(deal) for deal in deals} == {-(-used // (batch * world_size))}


def test_full_micro_batches_weigh_exactly_one() -> None:
    assert [tuple(share) for share in shares(((4, 4),), 1)] == [(4, 1.0, 1.0, True, False, 8, False, "")]
    assert [share.divisor for share in shares(((4, 4), (4, 4)), 0)] == [2.0, 2.0]


def test_alone_weighs_one_micro_batch_as_its_own_window() -> None:
    # Ranks with 3 and 1 samples: rank 0's mean weighs 3 of 4, over two ranks: divided by 4 / (3 * 2).
    share = shares(((4, 4), (3, 1)), 0)[1]
    assert share.alone == pytest.approx(4 / 6)
    assert share.divisor == pytest.approx(12 / 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_entering_at_a_position_gives_the_rest(world_size: int) -> None:
    deal = Deal(40, 3, 2, world_size, world_size - 1)
    whole, stride = dealt(deal), 3 * 2 * world_size
    assert dealt(deal, stride) == whole[1:]
    assert dealt(deal, 40) == []
