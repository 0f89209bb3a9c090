"""Logs while the system gets in the way: a full disk, a size limit, a tracker whose thread fails."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.ranks import run_script

from callbacks.report.runs import read_run

NAMES = ["CSVLogger", "JSONLLogger", "Report", *(["TensorBoardLogger"] if find_spec("tensorboard") else [])]
SCRIPT = """
import logging, os, resource, signal, sys
from pathlib import Path
import torch
from torch import nn
import callbacks
from callbacks import ModelCheckpoint
from engine import Callback, Fit, TrainModule

trouble, root, name, end, steps = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
logging.basicConfig(level=logging.WARNING)


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        for number in range(400):  # several pages of the file system a row
            self.log(f"a/metric with a long name {number}", float(self.global_step + 1))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def write_limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def fill():
    with open(root / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

BEGIN, END = {
    "full": (fill, lambda: (root / "filler").unlink()),
    "file size": (lambda: write_limit(14_000), lambda: write_limit(resource.RLIM_INFINITY)),
    "none": (lambda: None, lambda: None),
}[trouble]


class Troubles(Callback):
    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        if run.step == 4:
            BEGIN()
        if run.step == end:
            END()
        if run.step == 7 and end == 99 and steps == 12:  # the second half is for the resumed run
            run.wait_for_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)

checkpoint = ModelCheckpoint(dirpath=root / "elsewhere" / "saves", every=3, asynchronous=False)
fit = Fit(accelerator="cpu", max_steps=steps, max_epochs=None, root_dir=root / "run", log_every_n_steps=1,
          callbacks=[Troubles(), getattr(callbacks, name)(), checkpoint])
result = fit.run(Net(), [torch.ones(4, 1)] * 20, resume="auto")
report({"status": result.status, "step": result.step})
"""


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder, for ``full`` a file system of 2 MB, with a folder ``elsewhere`` on another one."""
    root, elsewhere = (Path(tempfile.mkdtemp(prefix="logging-")) for _ in range(2))
    small = getattr(request, "param", "") == "full"
    if small and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)], check=False).returncode:
        pytest.skip("only root may mount a small file system")
    (root / "elsewhere").symlink_to(elsewhere)
    yield root
    if small:
        subprocess.run(["umount", str(root)], check=True)
    shutil.rmtree(root)
    shutil.rmtree(elsewhere)


FILES = {
    "CSVLogger": "metrics.csv",
    "JSONLLogger": "metrics.jsonl",
    "Report": "report.jsonl",
    "TensorBoardLogger": "tensorboard/events",
}


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of each row, read as any program would."""
    metric = "a/metric with a long name 399"
    if name == "CSVLogger":
        with (folder / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
        assert {len(row) for row in rows} == {403}
        return [(int(row["step"]), float(row[metric])) for row in rows]
    if name == "JSONLLogger":
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["values"][metric]) for line in lines if "values" in line]
    if name == "Report":
        curve = read_run(folder).metrics[metric]
        return list(zip(map(int, curve.steps), curve.values.tolist(), strict=True))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(metric)]


def whole(steps: int) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["full", "file size"], indirect=True)
def test_rows_wait_until_they_can_be_written(place: Path, name: str, request: pytest.FixtureRequest) -> None:
    trouble = request.node.callspec.params["place"]
    ran = run_script(SCRIPT, trouble, place, name, 8, 12, forked=True)
    assert ran.value == {"status": "completed", "step": 12}
    assert logged(place / "run", name) == whole(12)
    reason = {"full": "No space left", "file size": "File too large"}[trouble]
    assert re.findall(rf"{name} (cannot|could not) write: .*{reason}.*{FILES[name]}", ran.stderr) == ["cannot"], (
        ran.stderr
    )
    assert ran.stderr.count(f"{name} writes again") == 1
    assert not [path for path in (place / "run").rglob("*") if path.name.endswith(".new")]
    run_script(SCRIPT, "none", place, name, 8, 15, forked=True)
    assert logged(place / "run", name) == whole(15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["full"], indirect=True)
def test_a_disk_that_stays_full(place: Path, name: str) -> None:
    ran = run_script(SCRIPT, "full", place, name, 99, 10, forked=True)
    assert ran.value == {"status": "completed", "step": 10}
    assert ran.stderr.count(f"{name} cannot write") == 1, ran.stderr
    assert ran.stderr.count(f"{name} could not write") == 1, ran.stderr
    rows = logged(place / "run", name)
    assert 3 <= len(rows) < 10
    assert rows == whole(len(rows))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["full"], indirect=True)
def test_a_kill_while_the_disk_is_full(place: Path, name: str) -> None:
    ran = run_script(SCRIPT, "full", place, name, 99, 12, forked=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (place / "filler").unlink()
    assert run_script(SCRIPT, "none", place, name, 8, 12, forked=True).value["step"] == 12
    rows = logged(place / "run", name)
    if name == "Report":  # its rows are not in checkpoints: those that waited are missing, and no others
        assert set(whole(12)) - set(rows) <= {(4, 4.0), (5, 5.0), (6, 6.0)}
    else:  # the checkpoint of step 6 has what waited then
        assert rows == whole(12)
