"""Random trainings by the library and by a plain float64 loop over the whole global batch, under every strategy.

``python -m tests.parity.differential`` runs more of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from differential.cases import STRATEGIES
from differential.pool import Pools
from differential.search import Search, reproducer

QUICK = ("single", "ddp2", "fsdp2", "tp2")
"""Strategies of the short run: they need two pools of ranks."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


@pytest.mark.parametrize("strategy", QUICK)
def test_trains_as_the_plain_loop(pools: Pools, strategy: str) -> None:
    search = Search(strategy, pools, shrink_seconds=20, deadline=time.monotonic() + 60, fixed=True, then=QUICK)
    search.run(12, 0)
    assert not search.found, reproducer(search.found[0])
    assert search.ran


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_many_train_as_the_plain_loop(pools: Pools, strategy: str) -> None:
    search = Search(strategy, pools, deadline=time.monotonic() + 50)
    search.run(1000, 1)
    assert not search.found, reproducer(search.found[0])
