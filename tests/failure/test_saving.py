"""Saves while the system gets in the way: a full disk, a size limit, lost permissions, signals, stopped ranks, clocks, other jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks, run_script

from engine.checkpoint.catalog import entries, problems

SCRIPT = """
import logging, os, resource, signal, subprocess, sys, time
from pathlib import Path
import torch
from torch import nn
from callbacks import ModelCheckpoint
from engine import Callback, Fit, TrainModule

trouble, root, options = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3])
logging.basicConfig(level=logging.WARNING)
if trouble == "read only":
    os.seteuid(12345)  # root may write everywhere


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(400, 400)  # 640 kB, and as much momentum

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def write_limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def fill():
    with open(root / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

def stop():
    if int(os.environ.get("RANK", 0)) == 1:
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

def set_back():
    clock = time.time
    time.time = lambda: clock() - 86400.0

saves = root / "checkpoints"
BEGIN, END = {
    "full": (fill, lambda: (root / "filler").unlink()),
    "file size": (lambda: write_limit(100_000), lambda: write_limit(resource.RLIM_INFINITY)),
    "read only": (lambda: saves.chmod(0o500), lambda: saves.chmod(0o700)),
    "clock": (set_back, lambda: None),
}.get(trouble, (lambda: None, lambda: None))


class Troubles(Callback):
    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        if run.step in (4, 8):
            run.wait_for_checkpoint()
            (BEGIN if run.step == 4 else END)()
        if trouble == "stop" and run.step == 5:
            stop()

    def on_save_checkpoint(self, run, module, checkpoint):
        if trouble == "SIGTERM" and run.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if trouble == "stop" and run.step in (2, 6):
            stop()


checkpoint = ModelCheckpoint(**{"every": 2, "save_top_k": -1, **options})
fit = Fit(accelerator="cpu", max_steps=12, max_epochs=None, root_dir=root, callbacks=[Troubles(), checkpoint],
          strategy="ddp" if "RANK" in os.environ else "auto")
try:
    result = fit.run(Net(), [torch.ones(4, 400)] * 12, resume="last" if trouble == "resume" else None)
except RuntimeError as error:
    answer = {"error": str(error)}
else:
    answer = ({"status": result.status, "step": result.step, "folder": str(result.folder), "last": str(result.last_checkpoint)})
if trouble == "read only":
    os.seteuid(0)
report(answer)
"""


def steps(root: Path) -> list[int]:
    """Those of the checkpoints; all are intact, and nothing else lies beside them."""
    listed = entries(root / "checkpoints")
    assert [entry["name"] for entry in listed if not entry["complete"]] == []
    assert not any(problems(root / "checkpoints").values())
    assert sorted(os.listdir(root / "checkpoints")) == sorted(entry["name"] for entry in listed)
    return [entry["step"] for entry in listed]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that any user may enter; for ``full`` a file system of 10 MB."""
    root = Path(tempfile.mkdtemp(prefix="saving-"))
    root.chmod(0o777)
    small = getattr(request, "param", "") == "full"
    if small and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(root)], check=False).returncode:
        pytest.skip("only root may mount a small file system")
    if os.getuid() and getattr(request, "param", "") == "read only":
        pytest.skip("only root may become another user")
    yield root
    if small:
        subprocess.run(["umount", str(root)], check=True)
    shutil.rmtree(root)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("place", ["full", "file size", "read only"], indirect=True)
def test_a_save_that_fails_leaves_the_earlier_ones(
    place: Path, asynchronous: bool, request: pytest.FixtureRequest
) -> None:
    trouble = request.node.callspec.params["place"]
    options = {"asynchronous": asynchronous, "max_failures": 3, "save_top_k": 3}
    ran = run_script(SCRIPT, trouble, place, options, forked=True)
    assert (ran.value["status"], ran.value["step"]) == ("completed", 12)
    text = {"full": "No space left", "file size": "File too large", "read only": "Permission denied"}[trouble]
    assert ran.stderr.count(text) == 2, ran.stderr  # of the steps 4 and 6
    assert steps(place) == [8, 10, 12]


@pytest.mark.parametrize("place", ["file size"], indirect=True)
def test_failures_in_a_row_end_the_training(place: Path) -> None:
    ran = run_script(SCRIPT, "file size", place, {"max_failures": 2}, forked=True)
    assert "step=00000006 was not written" in ran.value["error"]
    assert "Earlier checkpoints are unchanged" in ran.value["error"]
    assert steps(place) == [2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_signal_to_end_during_a_save(tmp_path: Path, asynchronous: bool) -> None:
    ran = run_script(SCRIPT, "SIGTERM", tmp_path, {"asynchronous": asynchronous}, check=False, forked=True)
    assert ran.returncode == 143, ran.stderr
    found = steps(tmp_path)
    assert found[:2] == [2, 4]
    assert found[-1] <= 5  # at the step that it came in, or the next
    assert run_script(SCRIPT, "resume", tmp_path, {}, forked=True).value["step"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_is_stopped_for_a_while(tmp_path: Path, asynchronous: bool) -> None:
    ran = run_ranks(SCRIPT, 2, "stop", tmp_path, {"asynchronous": asynchronous})
    assert [(rank.value["status"], rank.value["step"]) for rank in ran] == [("completed", 12)] * 2
    assert steps(tmp_path) == [2, 4, 6, 8, 10, 12]


def test_a_clock_that_goes_back(tmp_path: Path) -> None:
    ran = run_script(SCRIPT, "clock", tmp_path, {"save_top_k": 3}, forked=True)
    assert ran.value["last"].endswith("step=00000012")
    listed = entries(tmp_path / "checkpoints")
    assert [entry["step"] for entry in listed] == [8, 10, 12]
    again = run_script(SCRIPT, "resume", tmp_path, {}, forked=True)
    assert again.value["last"].endswith("step=00000012")


@pytest.mark.slow
def test_jobs_that_start_together_in_one_folder(tmp_path: Path) -> None:
    def job(_: int) -> Any:
        return run_script(SCRIPT, "none", tmp_path, {}, forked=False).value

    with ThreadPoolExecutor(3) as pool:
        folders = [Path(value["folder"]) for value in pool.map(job, range(3))]
    assert sorted(folders) == [tmp_path, tmp_path / "version_1", tmp_path / "version_2"]
    assert [steps(folder) for folder in folders] == [[2, 4, 6, 8, 10, 12]] * 3
