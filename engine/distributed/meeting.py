"""The rendezvous of one attempt's ranks, in a store that earlier attempts may have used.

A launcher's store outlives its ranks, and nothing in their environment distinguishes attempts: each machine's agent counts only its own restarts,
and machines come and go without one. So each rank draws a ticket, and rank 0 answers every ticket with the name of its own round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_TICKETS, _DONE = "fit/tickets", "fit/done"


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    where: str,
    *,
    timeout: timedelta,
    check: Callable[[], None] | None = None,
) -> dist.Store:
    """The part of ``store`` for the ranks of this round only; all of them call this. Rank 0 returns when all have joined.

    Args:
        where: the store's address, for messages.
        check: called on rank 0 about ten times a second while it waits for others; it may raise (``ScriptRanks.check``).

    Raises:
        RuntimeError: the others, or rank 0, did not join in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    ticket = store.add(_TICKETS, 1)
    if rank != 0:
        name = _answer(
            store, ticket, deadline, f"rank 0 did not connect to {where} within {timeout.total_seconds():g} s"
        )
        part = _part(store, name, timeout)
        part.add("joined", 1)
        return part
    mine = _part(store, str(ticket), timeout)
    joined, pause, answered = mine.add("joined", 0) + 1, 0.005, store.add(_DONE, 0)
    while joined < world_size:
        drawn = store.add(_TICKETS, 0)
        for each in range(answered + 1, drawn + 1):
            store.set(f"fit/answers/{each}", str(ticket))
        answered = drawn
        joined = mine.add("joined", 0) + 1
        if joined >= world_size:
            break
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {joined} of {world_size} ranks connected to {where} within {timeout.total_seconds():g} s. Look for the "
                "first error in the output of the others, and check whether their machines can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    store.add(_DONE, answered - store.add(_DONE, 0))  # the next rank 0 need not answer these
    return mine


def _answer(store: dist.Store, ticket: int, deadline: float, problem: str) -> str:
    key, pause = f"fit/answers/{ticket}", 0.005
    # Polled: a signal would not interrupt a blocking wait.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{problem}. Look for the first error in its output, and check whether its machine can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
    return store.get(key).decode()


def _part(store: dist.Store, name: str, timeout: timedelta) -> dist.Store:
    part = dist.PrefixStore(f"fit/{name}", store)
    part.set_timeout(timeout)
    return part
