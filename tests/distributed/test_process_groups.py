"""How many process groups and sockets a job has, and that it may open them."""

from __future__ import annotations

import resource
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, run_script
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.distributed import process_groups
from engine.distributed.environments import Environment
from engine.distributed.group import Group
from engine.distributed.join import join
from engine.strategies.mesh import data_group, make_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
RANK = 21


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The requested back end and size of each group that this rank, number 21 of 64, becomes a member of. All groups are fake ones."""
    found: list[tuple[str, int]] = []
    real = dist.new_group

    def new_group(ranks: list[int], backend: str, timeout: timedelta | None = None) -> Any:
        if RANK in ranks:
            found.append((backend, len(ranks)))
        return real(ranks, backend="fake")

    monkeypatch.setattr(dist, "new_group", new_group)
    # As a job on GPUs has it, without their library.
    monkeypatch.setattr(process_groups, "backend_of", lambda device: "nccl" if device.type == "cuda" else "gloo")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=64)
    yield found
    dist.destroy_process_group()


def joined(kind: str) -> Group:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    return join(Environment("torchrun", RANK, 64, RANK % 8, 8, 8), device, timeout=timedelta(seconds=60))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 64, 1, 1), []),  # one axis of all ranks is the default group
        ((1, 1, 1, 1, 64), []),  # and data that all ranks share needs none
        ((1, 8, 8, 1, 1), [("nccl", 8), ("nccl", 8)]),
        ((1, 64, 1, 1, 1), [("nccl", 1)]),  # replicating needs both data axes
        ((1, 1, 8, 1, 8), [("gloo", 8), ("nccl", 8), ("nccl", 8)]),  # the data axis is the group of the data, too
        ((2, 1, 4, 1, 8), [("gloo", 4), ("nccl", 4), ("nccl", 2), ("nccl", 8)]),
        ((2, 2, 2, 1, 8), [("gloo", 4), ("nccl", 4), ("nccl", 2), ("nccl", 2), ("nccl", 2), ("nccl", 8)]),
    ],
)
def test_groups_of_64_ranks(made: list[tuple[str, int]], sizes: tuple[int, ...], expected: list[Any]) -> None:
    group = joined("cuda")
    assert made == [("gloo", 64)]  # flags and objects
    named = dict(zip(AXES, sizes, strict=True))
    data_group(group, named)
    mesh = make_mesh(group, named)
    data_group(group, named)
    assert make_mesh(group, named) is mesh
    assert mesh.size() == 64
    assert sorted(made[1:]) == sorted(expected)
    del made[:]
    group.part([list(range(64))])  # the writer's own
    assert made == [("gloo", 64)]


def test_a_mesh_has_this_ranks_neighbours(made: list[tuple[str, int]]) -> None:
    mesh = make_mesh(joined("cpu"), {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 8})
    assert mesh.mesh_dim_names == ("pp", "dp_shard", "tp")
    assert mesh.get_coordinate() == (0, 2, 5)  # 21 = 0 * 32 + 2 * 8 + 5
    ranks = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    assert ranks == {"pp": [21, 53], "dp_shard": [5, 13, 21, 29], "tp": list(range(16, 24))}
    assert {backend for backend, _ in made} == {"gloo"}


TRAINED = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset
from callbacks import ModelCheckpoint
from engine import FSDP, Fit, MeshParallel, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def pipeline_stages(self):
        return list(self.net)

    def parallelize(self, mesh):
        return {f"net.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def sockets():
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))

before = sockets()
strategies = {
    "ddp": "ddp", "fsdp": "fsdp", "hybrid": FSDP(dp_replicate=2), "tp": MeshParallel(tp=2), "all tp": MeshParallel(tp=4),
    "pp and tp": MeshParallel(pp=2, tp=2, dp_shard=1),
}
name, root = sys.argv[1:]
fit = Fit(strategy=strategies[name], accelerator="cpu", max_steps=2, root_dir=root, callbacks=[ModelCheckpoint(every="1 steps")])
fit.run(Net(), DataLoader(TensorDataset(torch.randn(32, 8)), 4))
report([sorted(dist.get_world_size(group) for group in dist.distributed_c10d._world.pg_map), sockets() - before])
"""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tp", [2, 2, 2, 4, 4, 4]),
        pytest.param("ddp", [4, 4, 4], marks=pytest.mark.slow),
        pytest.param("fsdp", [4, 4, 4], marks=pytest.mark.slow),
        pytest.param("hybrid", [2, 2, 4, 4, 4], marks=pytest.mark.slow),
        pytest.param("all tp", [4, 4, 4], marks=pytest.mark.slow),
        pytest.param("pp and tp", [2, 2, 4, 4, 4], marks=pytest.mark.slow),
    ],
)
def test_groups_and_sockets_of_four_ranks(name: str, sizes: list[int], tmp_path: Any) -> None:
    for ran in run_ranks(TRAINED, 4, name, tmp_path):
        found, sockets = ran.value
        assert found == sizes
        # Each gloo group of n ranks listens, and is connected to n - 1; the job's store is one more.
        assert sockets == sum(sizes) + 1


LIMITED = """
import resource, sys
from engine.distributed import process_groups
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
try:
    process_groups.allow_descriptors(1024)
except RuntimeError as error:
    report(str(error))
else:
    report(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    "initialise",
    [
        process_groups.initialise_alone,
        lambda device: process_groups.initialise(device, dist.HashStore(), 0, 1, timedelta(seconds=60), debug=False),
    ],
    ids=["for a library", "for a check"],
)
def test_errors_of_one_process_do_not_begin_with_a_rank(initialise: Any) -> None:
    before = sys.excepthook
    initialise(torch.device("cpu"))
    during, initialised = sys.excepthook, dist.is_initialized()
    process_groups.destroy()
    assert initialised
    assert during is before is sys.excepthook


def test_the_limit_of_descriptors_is_raised_or_named() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY:
        most = 20000
    if most < 6000:
        pytest.skip(f"this machine allows {most} open files")
    assert run_ranks(LIMITED, 1, most)[0].value == [min(most, process_groups.ROOM), most]
    refused = run_script(LIMITED, 2000, forked=True).value
    assert "a rank of a job with 1024 processes needs about 56" in refused
    assert "this process may have only 2000: raise the hard limit where it starts (ulimit -Hn" in refused


FORKS = """
import hashlib, multiprocessing, os, subprocess, threading, time
from datetime import timedelta
from types import SimpleNamespace
import torch
from engine import Engine
from engine.distributed import join, process_groups

pauses = 0

def sleep(seconds):
    global pauses
    pauses += 1
    time.sleep(seconds)

process_groups.time = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)

def waited(fork):
    before, began = pauses, time.monotonic()
    fork()
    return [pauses - before, time.monotonic() - began]

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

def work():
    torch.multiprocessing._set_thread_name("pt_gloo_runloop")
    named.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in one call, which never waits for the interpreter's lock; ends with the process

Engine(accelerator="cpu")
without = process_groups._forks_wait
join.join_alone(torch.device("cpu"), timeout=timedelta(seconds=60))
quiet = min(waited(fork)[0] for _ in range(20))
named = threading.Event()
threading.Thread(target=work, daemon=True).start()
named.wait()
busy = [
    waited(fork),
    waited(lambda: multiprocessing.get_context("fork").Process(target=int).start()),
    waited(lambda: subprocess.run(["true"], preexec_fn=int)),
]
report([without, process_groups._forks_wait, quiet, busy])
os._exit(0)
"""


def test_a_fork_waits_until_gloos_threads_sleep_but_not_for_long() -> None:
    """However loaded the machine is: it pauses only beside a thread that works, and goes on while that still does."""
    without, waits, quiet, busy = run_script(FORKS, forked=True).value
    assert not without  # a single process has no gloo
    assert waits == process_groups.FORKS_MAY_HANG
    assert quiet == 0
    if waits:
        assert all(pauses and seconds >= process_groups.QUIET_S for pauses, seconds in busy)


ENDS = """
import atexit, hashlib, threading, time
from datetime import timedelta
import torch
from engine.distributed import join

def work():
    torch.multiprocessing._set_thread_name("pt_gloo_runloop")
    named.set()
    begun.wait()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)  # without the interpreter's lock
    rests.set()
    threading.Event().wait()

named, begun, rests = threading.Event(), threading.Event(), threading.Event()
threading.Thread(target=work, daemon=True).start()
named.wait()
atexit.register(lambda: report(rests.is_set()))  # runs after the group's handler, which is registered next
join.join_alone(torch.device("cpu"), timeout=timedelta(seconds=60))
begun.set()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are seen in /proc")
def test_a_process_ends_when_gloos_threads_sleep() -> None:
    """One that releases a collective's tensors later aborts the process (seen in one rank of twelve on a loaded core)."""
    assert run_script(ENDS).value is True
