"""Draws are divided among sources by their weights, whatever the weights are."""

from __future__ import annotations

import random

from engine.data.mixture_draws import apportion


def test_counts_of_sources_never_fall() -> None:
    chance = random.Random(1)
    for _ in range(20):
        weights = [chance.choice([0, 1, 3, 10**17 + 1, chance.randint(1, 10**6)]) for _ in range(chance.randint(1, 7))]
        if not sum(weights):
            continue
        before = [0] * len(weights)
        for count in range(60):
            counts = apportion(weights, count)
            assert sum(counts) == count
            assert all(a <= b for a, b in zip(before, counts, strict=True))
            assert all(not n for n, weight in zip(counts, weights, strict=True) if not weight)
            before = counts
