"""What is left of a process that is killed: none of its data workers, and nothing in the temporary folder after the next job."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.commands import alive
from support.ranks import PATIENCE_S, run_script

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from engine import Engine

moment, context, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def kill_parent():
    parent = os.getppid()
    (place / "worker.new").write_text(str(os.getpid()))
    (place / "worker.new").rename(place / "worker")
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.001)

def initialise(worker):
    if moment == "initialisation":
        kill_parent()

class Rows(IterableDataset):
    def __iter__(self):
        if moment == "opening":
            kill_parent()
        return iter(torch.ones(4, 2))

class Items(TensorDataset):
    def __getitem__(self, index):
        if moment == "reading" and index == 3:
            kill_parent()
            time.sleep(600)
        return super().__getitem__(index)

if __name__ == "__main__":
    data = Rows() if moment == "opening" else Items(torch.ones(4, 2))
    loader = DataLoader(data, num_workers=1, worker_init_fn=initialise, multiprocessing_context=context)
    for batch in Engine(accelerator="cpu").prepare(loader):
        pass
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S / 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not alive(pid):
        return True
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize(
    ("moment", "context"),
    [("initialisation", "fork"), ("opening", "fork"), pytest.param("initialisation", "spawn", marks=pytest.mark.slow)],
)
def test_a_worker_that_starts_while_its_parent_is_killed_ends(moment: str, context: str, tmp_path: Path) -> None:
    ran = run_script(SCRIPT, moment, context, tmp_path, check=False, forked=context == "fork")
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert gone(int((tmp_path / "worker").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="workers send sockets' addresses on Linux")
def test_the_next_job_removes_the_directories_of_workers_that_were_killed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not below tmp_path: a socket's path has at most 107 characters
        directories_go(tmp_path, Path(folder))


def directories_go(tmp_path: Path, temporary: Path) -> None:
    env = {"TMPDIR": str(temporary)}
    ran = run_script(SCRIPT, "reading", "fork", tmp_path, check=False, env=env)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, signal.SIGKILL)
    assert gone(worker)
    left = {path.name.partition("-")[0] for path in temporary.iterdir()}
    assert "fitw" in left
    assert "pymp" not in left
    run_script(SCRIPT, "never", "fork", tmp_path, env=env)
    assert not {"fitw", "pymp"} & {path.name.partition("-")[0] for path in temporary.iterdir()}
