"""What a process notes of the ranks that it has started."""

from __future__ import annotations

import os

from engine.distributed.own_process import OwnProcess, StartedRanks


class Ranks(StartedRanks):
    def check(self, error: BaseException | None = None, wait_s: float = 3.0) -> None:
        raise AssertionError


def test_ranks_belong_to_the_process_that_has_started_them() -> None:
    process, ranks = OwnProcess(), Ranks()
    assert process.started is None
    process.started = ranks
    assert process.started is ranks
    child = os.fork()
    if child == 0:
        os._exit(0 if process.started is None else 1)
    assert os.waitpid(child, 0)[1] == 0
