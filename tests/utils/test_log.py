"""What a run says at its start: on a terminal, in a pipe, and where the program has configured logging."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import clean_environment, run_script

SAYS = """
import logging, os, pty, sys
import torch
from callbacks import CSVLogger, ModelCheckpoint, RichProgressBar, SimpleProfiler
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1).requires_grad_(False)
    def training_step(self, batch, i):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def said(root, terminal, *callbacks, resume=None, **settings):
    reading, writing = pty.openpty() if terminal else os.pipe()
    before = os.dup(2)
    os.dup2(writing, 2)
    try:
        fit = Fit(accelerator="cpu", log_every_n_steps=1, root_dir=root, callbacks=list(callbacks), **settings)
        fit.run(Net(), [torch.ones(2, 2)] * 4, resume=resume)
        sys.stderr.write("end\\n")
        sys.stderr.flush()
    finally:
        os.dup2(before, 2)
    text = b""
    while not text.replace(b"\\r", b"").endswith(b"end\\n"):
        text += os.read(reading, 65536)
    return text.decode().replace("\\r\\n", "\\n").removesuffix("end\\n").splitlines()

root = sys.argv[1]
out = {"plain": said(f"{root}/plain", True, max_steps=2), "pipe": said(f"{root}/pipe", False, max_steps=2)}
out["saves"] = said(f"{root}/saves", True, CSVLogger(), ModelCheckpoint(), max_steps=2)
out["resumes"] = said(f"{root}/saves", True, ModelCheckpoint(), max_steps=3, resume="last")
out["profiled"] = said(f"{root}/profiled", False, SimpleProfiler(), max_steps=2)
out["bar"] = said(f"{root}/bar", True, RichProgressBar(), max_steps=2)
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=open(f"{root}/log", "w"))
out["configured"] = said(f"{root}/configured", True, SimpleProfiler(), max_steps=2)
report(out)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("said")


@pytest.fixture(scope="module")
def said(place: Path) -> Any:
    return run_script(SAYS, place, forked=True).value


START = "training with 1 process (cpu), strategy single, precision 32-true; 6 parameters, 3 of them trained"
FIRST_STEP = r"first step done, \d+\.\d s after the start"


def test_on_a_terminal_a_run_says_what_runs_where(said: Any, place: Path) -> None:
    start, first_step = said["plain"]  # and nothing of the steps
    assert start == f"{START}; run folder: {place / 'plain'}"
    assert re.fullmatch(FIRST_STEP, first_step)


def test_the_folder_is_said_once(said: Any, place: Path) -> None:
    assert said["saves"][:2] == [f"this run writes into {place / 'saves'}", START]
    assert re.fullmatch(FIRST_STEP, said["saves"][2])
    assert len(said["saves"]) == 3


def test_a_resumed_run_says_from_where(said: Any, place: Path) -> None:
    checkpoint = place / "saves" / "checkpoints" / "step=00000002"
    assert f"resumed from {checkpoint}: epoch 0, step 2" in said["resumes"]


def test_in_a_pipe_a_run_is_quiet(said: Any) -> None:
    assert said["pipe"] == []


def test_the_profilers_table_is_shown_without_logging(said: Any) -> None:
    assert re.match(r"SimpleProfiler \(fit\): [\d.]+ s in all", said["profiled"][0])
    assert any(line.startswith("forward ") for line in said["profiled"])


def test_with_a_bar_the_start_is_said_once_and_the_bar_shows_the_steps(said: Any) -> None:
    text = "\n".join(said["bar"])
    assert text.count("training with") == 1
    assert "first step done" not in text


def test_where_logging_is_configured_the_lines_come_once(said: Any, place: Path) -> None:
    assert said["configured"] == []
    text = (place / "log").read_text()
    assert text.count("training with") == text.count("first step done") == text.count("s in all") == 1


LAUNCHED = """
import torch
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, i):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

Fit(accelerator="cpu", callbacks=[], max_epochs=1).run(Net(), [torch.ones(2, 2)] * 4)
"""


@pytest.mark.parametrize("terminal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_launched_run_says_what_runs_where_if_the_launcher_has_a_terminal(tmp_path: Path, terminal: bool) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    reading, writing = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-m", "engine.cli.main", "launch", "--nproc", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, env=clean_environment(NO_COLOR="1"), stderr=writing, timeout=300, check=True)
    os.write(writing, b"end\n")
    text = b""
    while not text.replace(b"\r", b"").endswith(b"end\n"):
        text += os.read(reading, 65536)
    os.close(reading)
    os.close(writing)
    lines = [line for line in text.decode().splitlines() if line.startswith("[rank")]
    starts = [line for line in lines if "training with 2 processes (cpu), strategy ddp" in line]
    assert len(starts) == terminal, lines
    assert [line[:9] for line in lines] == ["[rank 0] "] * (2 * terminal)  # the start, and the first step
