import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import clean_environment, rank_variables, run_ranks

from engine.distributed.environment import Environment
from engine.distributed.group import join

HEAD = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from engine.distributed import collectives as c, group as groups
from engine.distributed.environment import detect
from engine.distributed.group import join
CPU, SOON = torch.device("cpu"), timedelta(seconds=300)
env = detect(os.environ)
"""

CHECKS = """
shown_by = sys.excepthook
group = join(env, CPU, timeout=SOON)
again = join(env, CPU, timeout=SOON)
out = {"who": [group.rank, group.world_size, group.local_rank, group.is_main, str(group.device), group.failed],
       "errors begin with the rank": sys.excepthook is not shown_by, "shared": again.cpu is group.cpu, "side": group.cpu is not dist.group.WORLD}
begun = time.monotonic()
if group.rank == 1:
    time.sleep(0.5)
group.barrier()
out["barrier"] = time.monotonic() - begun > 0.3
again.failed = True
out["failed is shared"] = group.failed
join(env, CPU, timeout=SOON)
out["failed is cleared"] = not group.failed
group.close()
group.close()
out["closed"] = [dist.is_initialized(), group.cpu is None, sys.excepthook is shown_by]
third = join(env, CPU, timeout=SOON)
out["joined anew"] = c.gather_object(third, env.rank)
again.close()  # of the group that is gone: must not take the new one with it
out["survives"] = c.gather_object(third, env.rank)
report(out)
"""


@pytest.fixture(scope="module")
def checks():
    return [ran.value for ran in run_ranks(HEAD + CHECKS, 2)]


def test_places(checks):
    assert [found["who"] for found in checks] == [[0, 2, 0, True, "cpu", False], [1, 2, 1, False, "cpu", False]]


@pytest.mark.parametrize("name", ["shared", "side", "barrier", "failed is shared", "failed is cleared"])
def test_group(checks, name):
    assert [found[name] for found in checks] == [True, True]


def test_closing_and_joining_anew(checks):
    for found in checks:
        assert found["errors begin with the rank"]
        assert found["closed"] == [False, True, True]
        assert found["joined anew"] == found["survives"] == [0, 1]


def test_alone_there_is_no_process_group():
    group = join(Environment("single"), torch.device("cpu"), timeout=timedelta(seconds=1))
    assert group.cpu is None
    assert not dist.is_initialized()
    group.failed = True
    group.barrier()
    group.close()
    assert (group.rank, group.world_size, group.is_main) == (0, 1, True)


def test_without_an_agent_rank_0_serves_the_store():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = HEAD + "assert c.gather_object(join(env, CPU, timeout=SOON), env.rank) == [0, 1]"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=clean_environment(**rank_variables(rank, 2, port)),
            stderr=subprocess.PIPE,
        )
        for rank in (1, 0)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_a_port_in_use_is_named():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        environment = Environment("torchrun", 0, 2, 0, 2, 1, "127.0.0.1", port)
        with pytest.raises(
            RuntimeError, match=rf"could not serve the job's store at 127.0.0.1:{port}.*choose another MASTER_PORT"
        ):
            join(environment, torch.device("cpu"), timeout=timedelta(seconds=2))


def test_ranks_that_do_not_come_are_counted_and_the_check_is_asked():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = Environment("torchrun", 0, 3, 0, 3, 1, "127.0.0.1", store.port, agent_store=True)
    with pytest.raises(RuntimeError, match="only 1 of 3 ranks connected"):
        join(environment, torch.device("cpu"), timeout=timedelta(seconds=0.3), store=store)

    def check() -> None:
        raise KeyError("rank 1 has died")

    with pytest.raises(KeyError, match="rank 1 has died"):
        join(environment, torch.device("cpu"), timeout=timedelta(seconds=60), store=store, check=check)
    assert not dist.is_initialized()


USERS = """
store = dist.TCPStore(env.master_addr, env.master_port, is_master=False)
dist.init_process_group("gloo", store=store, rank=env.rank, world_size=2)
group = join(env, CPU, timeout=SOON)
out = {"gathered": c.gather_object(group, env.rank)}
group.close()
out["still there"] = dist.is_initialized()
try:
    join(detect({}), CPU, timeout=SOON)
except RuntimeError as error:
    out["error"] = str(error)
dist.barrier()
dist.destroy_process_group()
report(out)
"""


def test_a_group_that_the_user_initialised_is_used_and_left_alone():
    for rank, ran in enumerate(run_ranks(HEAD + USERS, 2)):
        assert ran.value["gathered"] == [0, 1]
        assert ran.value["still there"] is True
        assert f"rank {rank} of 2" in ran.value["error"]
        assert "rank 0 of 1" in ran.value["error"]


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


def test_a_process_that_ends_normally_waits_for_a_late_one():
    ran = run_ranks(HEAD + LEAVING, 2, "late")
    assert ran[0].seconds > 2.0
    assert [r.stderr for r in ran] == ["", ""]


def test_a_process_that_ends_with_an_error_waits_for_nobody():
    # Without care it would hang in a destructor until the pending collective's timeout, 120 s here and half an hour in real life.
    ran = run_ranks(HEAD + LEAVING, 2, "pending", check=False)
    assert ran[1].returncode == 1
    assert "ValueError: on rank 1" in ran[1].stderr
    assert ran[0].value is True


def test_a_rank_marked_as_failed_waits_for_nobody_and_the_others_wait_a_bounded_time():
    ran = run_ranks(HEAD + LEAVING, 2, "marked")
    assert ran[1].seconds < ran[0].seconds - 3.0
    assert ran[0].seconds - ran[1].seconds < 25.0


def test_a_rank_that_is_busy_for_longer_than_the_others_wait_leaves_alone():
    ran = run_ranks(HEAD + "groups.LEAVE_S = 0.5\nif join(env, CPU, timeout=SOON).rank == 0:\n    time.sleep(4)", 2)
    assert ran[1].seconds < ran[0].seconds
    assert [r.stderr for r in ran] == ["", ""]


# Both handlers run after the group's own, which leaves it.
GIVEN_UP = """
import atexit, pathlib
groups.LEAVE_S = 0.5
here = pathlib.Path(sys.argv[1])

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

atexit.register(lambda: ((here / f"{env.rank} has left").touch(), wait_for("1 has left")))
if join(env, CPU, timeout=timedelta(minutes=30)).rank == 1:
    wait_for("0 has left")
"""


def test_a_late_rank_does_not_wait_for_one_that_has_given_up_and_lives_on(tmp_path):
    # Rank 0 does so where it has started the others: it waits for the ends of their processes.
    ran = run_ranks(HEAD + GIVEN_UP, 2, tmp_path)
    assert [r.stderr for r in ran] == ["", ""]


@pytest.mark.slow
def test_exits_never_abort():
    begun = time.monotonic()
    for _ in range(10):
        assert [ran.returncode for ran in run_ranks(HEAD + "join(env, CPU, timeout=SOON).barrier()", 3)] == [0, 0, 0]
    assert time.monotonic() - begun < 200
    assert "RANK" not in os.environ


def test_an_environment_without_an_address_is_an_error():
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 does not know the address of the others: .*no master_addr or no master_port"
    ):
        join(Environment("mine", 1, 2, 1, 2), torch.device("cpu"), timeout=timedelta(seconds=1))
