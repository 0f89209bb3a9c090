"""What a process knows of the ranks that it has started, and how it leaves those that it has joined."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from engine.distributed.environments import Environment
from engine.distributed.own_process import OwnProcess, StartedJob


def test_ranks_belong_to_the_process_that_has_started_them() -> None:
    process, job = OwnProcess(), StartedJob(Environment("relaunch", 0, 2, 0, 2, 1), dist.HashStore())
    assert process.started is None
    process.started = job
    assert process.started is job
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

MARKS = """
import atexit, pathlib
here = pathlib.Path(sys.argv[1])

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

"""
"""Ranks that wait for each other's files, and so for what has happened, however slow the machine is. An exit handler that is registered before the
group's own runs after that."""

LATE = """
own_process.LEAVE_S = 300.0
atexit.register(lambda: report((here / "1 ends").exists()))
if join(env, CPU, timeout=SOON).rank == 1:
    time.sleep(0.5)  # long enough for a rank that waits for nobody to report too early
    (here / "1 ends").touch()
"""

MARKED = """
own_process.LEAVE_S = 0.5
atexit.register((here / f"{env.rank} has left").touch)
group = join(env, CPU, timeout=timedelta(seconds=120))
if group.rank == 1:
    group.failed = True
else:
    wait_for("1 has left")
"""

BUSY = """
own_process.LEAVE_S = 0.5
atexit.register((here / f"{env.rank} has left").touch)
if join(env, CPU, timeout=SOON).rank == 0:
    wait_for("1 has left")
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
    dist.all_reduce(torch.ones(3), async_op=True)  # rank 0 will never join it
    raise ValueError("on rank 1")
if group.rank == 0:
    deadline = time.monotonic() + 60
    while not ended(pids[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    report(ended(pids[1]))
    group.failed = True
"""


def test_a_process_that_ends_normally_waits_for_a_late_one(tmp_path: Path) -> None:
    ran = run_ranks(HEAD + MARKS + LATE, 2, tmp_path)
    assert [r.value for r in ran] == [True, True]
    assert [r.stderr for r in ran] == ["", ""]


def test_a_process_that_ends_with_an_error_waits_for_nobody() -> None:
    # Without care it would hang in a destructor until the pending collective's timeout, 120 s here and half an hour in real life.
    ran = run_ranks(HEAD + LEAVING, 2, check=False)
    assert ran[1].returncode == 1
    assert "ValueError: on rank 1" in ran[1].stderr
    assert ran[0].value is True


def test_a_rank_marked_as_failed_waits_for_nobody_and_the_others_wait_a_bounded_time(tmp_path: Path) -> None:
    run_ranks(HEAD + MARKS + MARKED, 2, tmp_path, timeout=110)  # they end, and before the group's timeout
    assert {path.name for path in tmp_path.iterdir()} == {"0 has left", "1 has left"}


def test_others_leave_a_rank_that_is_busy_for_longer_than_they_wait(tmp_path: Path) -> None:
    ran = run_ranks(HEAD + MARKS + BUSY, 2, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0 has left", "1 has left"}
    assert [r.stderr for r in ran] == ["", ""]


# Both handlers run after the group's own, which leaves it.
GIVEN_UP = """
own_process.LEAVE_S = 0.5
atexit.register(lambda: ((here / f"{env.rank} has left").touch(), wait_for("1 has left")))
if join(env, CPU, timeout=timedelta(minutes=30)).rank == 1:
    wait_for("0 has left")
"""


def test_a_late_rank_does_not_wait_for_one_that_has_given_up_and_lives_on(tmp_path: Path) -> None:
    # Rank 0 does so where it has started the others: it waits for the ends of their processes.
    ran = run_ranks(HEAD + MARKS + GIVEN_UP, 2, tmp_path)
    assert [r.stderr for r in ran] == ["", ""]


@pytest.mark.slow
def test_exits_never_abort() -> None:
    begun = time.monotonic()
    for _ in range(10):
        assert [ran.returncode for ran in run_ranks(HEAD + "join(env, CPU, timeout=SOON).barrier()", 3)] == [0, 0, 0]
    assert time.monotonic() - begun < 200
    assert "RANK" not in os.environ
