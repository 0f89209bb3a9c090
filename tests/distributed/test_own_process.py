"""What a process knows of the ranks that it has started, and how it leaves those that it has joined."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.ranks import run_ranks

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


HEAD = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from engine.distributed import collectives as c, own_process
from engine.distributed.environments import detect
from engine.distributed.join import join
CPU, SOON = torch.device("cpu"), timedelta(seconds=300)
env = detect(os.environ)
"""

LEAVING = """
def ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

group = join(env, CPU, timeout=timedelta(seconds=120))
pids = c.gather_object(group, os.getpid())
if group.rank == 1:
    how = sys.argv[1]
    if how == "late":
        time.sleep(2)
    if how == "pending":
        dist.all_reduce(torch.ones(3), async_op=True)  # rank 0 will never join it
        raise ValueError("on rank 1")
    if how == "marked":
        group.failed = True
if group.rank == 0 and sys.argv[1] == "pending":
    deadline = time.monotonic() + 60
    while not ended(pids[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    report(ended(pids[1]))
    group.failed = True
"""


def test_a_process_that_ends_normally_waits_for_a_late_one() -> None:
    ran = run_ranks(HEAD + LEAVING, 2, "late")
    assert ran[0].seconds > 2.0
    assert [r.stderr for r in ran] == ["", ""]


def test_a_process_that_ends_with_an_error_waits_for_nobody() -> None:
    # Without care it would hang in a destructor until the pending collective's timeout, 120 s here and half an hour in real life.
    ran = run_ranks(HEAD + LEAVING, 2, "pending", check=False)
    assert ran[1].returncode == 1
    assert "ValueError: on rank 1" in ran[1].stderr
    assert ran[0].value is True


def test_a_rank_marked_as_failed_waits_for_nobody_and_the_others_wait_a_bounded_time() -> None:
    ran = run_ranks(HEAD + LEAVING, 2, "marked")
    assert ran[1].seconds < ran[0].seconds - 3.0
    assert ran[0].seconds - ran[1].seconds < 25.0


def test_a_rank_that_is_busy_for_longer_than_the_others_wait_leaves_alone() -> None:
    ran = run_ranks(
        HEAD + "own_process.LEAVE_S = 0.5\nif join(env, CPU, timeout=SOON).rank == 0:\n    time.sleep(4)", 2
    )
    assert ran[1].seconds < ran[0].seconds
    assert [r.stderr for r in ran] == ["", ""]


# Both handlers run after the group's own, which leaves it.
GIVEN_UP = """
import atexit, pathlib
own_process.LEAVE_S = 0.5
here = pathlib.Path(sys.argv[1])

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

atexit.register(lambda: ((here / f"{env.rank} has left").touch(), wait_for("1 has left")))
if join(env, CPU, timeout=timedelta(minutes=30)).rank == 1:
    wait_for("0 has left")
"""


def test_a_late_rank_does_not_wait_for_one_that_has_given_up_and_lives_on(tmp_path: Path) -> None:
    # Rank 0 does so where it has started the others: it waits for the ends of their processes.
    ran = run_ranks(HEAD + GIVEN_UP, 2, tmp_path)
    assert [r.stderr for r in ran] == ["", ""]


@pytest.mark.slow
def test_exits_never_abort() -> None:
    begun = time.monotonic()
    for _ in range(10):
        assert [ran.returncode for ran in run_ranks(HEAD + "join(env, CPU, timeout=SOON).barrier()", 3)] == [0, 0, 0]
    assert time.monotonic() - begun < 200
    assert "RANK" not in os.environ
