"""Ranks that meet in a store which earlier attempts have used."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from engine.distributed.meeting import meet

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def come(
    pool: ThreadPoolExecutor, server: dist.TCPStore, rank: int, world_size: int, timeout: timedelta = TIMEOUT
) -> Future[dist.Store]:
    return pool.submit(meet, client(server), rank, world_size, "here", timeout=timeout)


def test_attempts_of_different_sizes_share_nothing(server: dist.TCPStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number, world_size in enumerate([3, 1, 2, 4, 2]):
            # Rank 0 is the last to come, or the first.
            ranks = range(world_size) if number % 2 else reversed(range(world_size))
            coming = {rank: come(pool, server, rank, world_size) for rank in ranks}
            parts = [coming[rank].result(30) for rank in range(world_size)]
            for rank, part in enumerate(parts):
                assert not part.check(["from/0"]) or rank > 0
                part.set(f"from/{rank}", str(number))
            assert all(part.get(f"from/{rank}") == str(number).encode() for part in parts for rank in range(world_size))
            assert parts[0].add("left", 1) == 1


def test_a_rank_that_died_while_it_waited_is_not_counted(server: dist.TCPStore) -> None:
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(RuntimeError, match=r"rank 0 did not connect to here within 0.3 s"):
            come(pool, server, 1, 3, timedelta(seconds=0.3)).result()
        first = come(pool, server, 0, 3)
        second = come(pool, server, 2, 3)
        time.sleep(0.3)
        assert not first.done()  # two tickets are answered, the first of them to nobody
        third = come(pool, server, 1, 3)
        assert [each.result(30).add("joined", 0) for each in (first, second, third)] == [
            2,
            2,
            2,
        ]  # all but rank 0, in one part


def test_rank_0_tells_how_many_came(server: dist.TCPStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        come(pool, server, 1, 3)
        with pytest.raises(RuntimeError, match=r"only 2 of 3 ranks connected to here within 0.5 s"):
            come(pool, server, 0, 3, timedelta(seconds=0.5)).result()
