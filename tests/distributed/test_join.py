import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import clean_environment, rank_variables, run_ranks

from engine.distributed.environments import Environment
from engine.distributed.join import join, meet

HEAD = """
import os, pathlib, sys, tempfile, time
from datetime import timedelta
import torch, torch.distributed as dist
from engine.distributed import collectives as c
from engine.distributed.environments import detect
from engine.distributed.join import join
CPU, SOON = torch.device("cpu"), timedelta(seconds=300)
env = detect(os.environ)
"""

CHECKS = """
shown_by = sys.excepthook
group = join(env, CPU, timeout=SOON)
again = join(env, CPU, timeout=SOON)
out = {"who": [group.rank, group.world_size, group.local_rank, group.is_main, str(group.device), group.failed],
       "errors begin with the rank": sys.excepthook is not shown_by, "shared": again.cpu is group.cpu, "side": group.cpu is not dist.group.WORLD}
mark = pathlib.Path(c.gather_json(group, tempfile.mkdtemp())[0]) / "rank 1 was here"
if group.rank == 1:
    time.sleep(0.2)  # long enough for a rank that does not wait to look too early
    mark.touch()
group.barrier()
out["barrier"] = mark.exists()
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


def test_an_environment_without_an_address_is_an_error():
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 does not know the address of the others: .*no master_addr or no master_port"
    ):
        join(Environment("mine", 1, 2, 1, 2), torch.device("cpu"), timeout=timedelta(seconds=1))


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
