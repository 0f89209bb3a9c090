"""What a job on one machine shows to the network: nothing beyond loopback, and what arrives at its ports is never unpickled."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.commands import Launched, free_port, pids
from support.ranks import clean_environment

from engine.distributed import addresses, stores

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from engine import Fit, TrainModule

place = Path(sys.argv[1])

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            (place / f"pid.{self.global_rank}").write_text(str(os.getpid()))
            while not (place / "go").exists():
                time.sleep(0.05)
        return (self.w * batch).mean()
    def on_train_end(self):
        (place / f"w.{self.global_rank}").write_text(str(self.w.item()))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

fit = Fit(accelerator="cpu", strategy="ddp", devices=int(sys.argv[2]), max_epochs=1, root_dir=place / "runs")
fit.run(Net(), torch.utils.data.DataLoader(torch.ones(16, 1), 2))
"""


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.place),)


def processes(root: int) -> Iterator[int]:
    """A process and all that come from it."""
    yield root
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from processes(int(child))


def listening(pid: int) -> set[tuple[str, int]]:
    """Address and port of each TCP socket on which a process listens, or UDP socket that it has bound."""
    own = {
        found[1] for each in Path(f"/proc/{pid}/fd").iterdir() if (found := re.match(r"socket:\[(\d+)\]", link(each)))
    }
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in own:
                raw, port = fields[1].split(":")
                words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def attack(port: int, run_ids: set[str], evil: bytes, wait_s: float) -> bool:
    """As somebody who reaches the port: raw bytes, and as a store's client the notes that torch's rendezvous would unpickle. Whether a store
    has taken them."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(evil)
    child = (
        os.fork()
    )  # torch's client waits without a limit for an answer, which only a store gives: then this process is killed
    if child == 0:
        with contextlib.suppress(BaseException):  # gloo's: what comes there is ended with the job
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
            for run_id in run_ids:
                for value in (evil, base64.b64encode(evil)):
                    store.set(f"torch.rendezvous.{run_id}", value)
            os._exit(0)
        os._exit(1)
    deadline = time.monotonic() + wait_s
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--rdzv", "port"), marks=pytest.mark.slow)], ids=["any port", "a port"]
)
def test_one_machine_listens_on_loopback_and_unpickles_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    bomb = tmp_path / "unpickled"
    evil = pickle.dumps(Bomb(bomb))
    given = ("--rdzv", f"localhost:{free_port()}") if options else ()
    with Launched(tmp_path, "--nproc", 2, *given, script, tmp_path, 2) as job:
        job.until(lambda: pids(tmp_path, 2), 300)
        everybody = list(processes(job.process.pid))
        assert set(pids(tmp_path, 2)) < set(everybody)
        found = {each for pid in everybody for each in listening(pid)}
        ports = {port for _, port in found}
        assert len(ports) >= 3  # the store, and what gloo has made for each rank
        assert {where for where, _ in found} <= LOOPBACK
        environment = dict(
            each.split("=", 1)
            for each in Path(f"/proc/{pids(tmp_path, 2)[0]}/environ").read_text().split("\0")
            if "=" in each
        )
        assert len(environment["TORCHELASTIC_RUN_ID"]) == 32
        served = {port for _, port in listening(job.process.pid)}
        run_ids = {"fit", environment["TORCHELASTIC_RUN_ID"]}
        assert served == {port for port in ports if attack(port, run_ids, evil, wait_s=60 if port in served else 0.5)}
        (tmp_path / "go").touch()
        assert job.wait(300) == 0, job.text
    assert [(tmp_path / f"w.{rank}").read_text() for rank in range(2)] == ["-4.0", "-4.0"]
    assert not bomb.exists()


@pytest.mark.slow
def test_ranks_that_fit_has_started_listen_on_loopback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, script, tmp_path, "2"], env=clean_environment(), stdout=subprocess.DEVNULL
    ) as job:
        try:
            deadline = time.monotonic() + 300
            while not pids(tmp_path, 2):
                assert job.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            found = {each for pid in processes(job.pid) for each in listening(pid)}
            assert len(found) >= 3
            assert {where for where, _ in found} <= LOOPBACK
            (tmp_path / "go").touch()
            assert job.wait(300) == 0
        finally:
            job.kill()


@pytest.mark.parametrize(
    ("host", "seen"), [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1"}), ("::1", {"::1"})]
)
def test_a_store_listens_where_it_was_asked_to(host: str, seen: set[str]) -> None:
    if not addresses.is_own(host):
        pytest.skip(f"this machine has no {host}")
    store = stores.serve(host, 0, timeout=timedelta(seconds=30))
    assert {found for found, port in listening(os.getpid()) if port == store.port} == seen
    client = dist.TCPStore(host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    client.set("name", "value")
    assert store.get("name") == b"value"


def test_at_an_address_that_is_not_loopback_torch_listens() -> None:
    assert stores._listener("192.0.2.200", 0) is None
    assert stores._listener("some-host", 0) is None


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(dist.DistNetworkError):
            stores.serve("127.0.0.1", holder.getsockname()[1], timeout=timedelta(seconds=3))
