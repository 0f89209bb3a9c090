"""The processes of a run: ``devices=2`` in a plain script, ranks that die, and requests that cannot be met."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import clean_environment, ranks_of, run_script
from support.toys import Weight, fit, ones

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import os, time
import torch
from torch.utils.data import DataLoader
from support.toys import Weight, fit

RANK = int(os.environ.get("RANK", 0))

class Module(Weight):
    def training_step(self, batch, batch_idx):
        if sys.argv[2] == "dies" and self.global_rank == 1 and self.global_step == 3:
            raise ZeroDivisionError("on purpose")
        if sys.argv[2] == "is-killed" and self.global_rank == 1 and self.global_step == 3:
            os.kill(os.getpid(), 9)
        return super().training_step(batch, batch_idx)

module = Module()
began = time.monotonic()
data = DataLoader(torch.arange(1.0, 9.0).reshape(8, 1), batch_size=1)
result = fit(sys.argv[1], devices=2, max_epochs=1000 if sys.argv[2] != "ends" else 2).run(module, data)
if RANK == 0:
    report([os.environ.get("RANK"), module.w.item(), result.step, result.status, fit(sys.argv[1], devices=2).test(module, data)])
else:
    fit(sys.argv[1], devices=2).test(module, data)
"""


def test_the_calling_process_goes_on_with_the_trained_module(tmp_path: Path) -> None:
    ran = run_script(SCRIPT, tmp_path, "ends", forked=True)
    # Two epochs of 4 steps, with the mean gradients 1.5, 3.5, 5.5 and 7.5.
    assert ran.value == [None, -36.0, 8, "completed", [{"test": 4.5}]]


PLANTED = """
import sys
from engine.launch.script_ranks import ScriptRanks

def fails(self):
    raise SystemExit("planted")

ScriptRanks._await_failure = fails
"""


@pytest.mark.slow
def test_a_job_whose_ranks_nobody_watches_ends(tmp_path: Path) -> None:
    ran = run_script(PLANTED + SCRIPT, tmp_path, "endless", check=False, forked=True)
    assert ran.returncode == 1
    assert "the thread that watches the ranks has failed: SystemExit: planted" in ran.stderr


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "ZeroDivisionError: on purpose"),
        pytest.param("is-killed", "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_dying_rank_ends_all_and_is_named(tmp_path: Path, how: str, told: str) -> None:
    ran = run_script(SCRIPT, tmp_path, how, check=False, forked=True)
    assert ran.returncode == 1
    assert ran.value is None
    assert told in ran.stderr
    assert "RankError: rank 1" in ran.stderr


ENDS = """
import os, signal, sys, time
import torch
from engine import Fit, TrainModule
from callbacks import ModelCheckpoint

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, i):
        if self.global_step == 3 and self.global_rank == 0:
            print("step", flush=True)
        if self.global_step == 3 and sys.argv[1] == f"interrupt rank {self.global_rank}":
            os.kill(os.getpid(), signal.SIGINT)
        if self.global_step == 3 and "interrupt" not in sys.argv[1] and str(self.global_rank) in sys.argv[1]:
            raise ValueError("bad luck")
        time.sleep(0.01)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

fit = Fit(devices=2, accelerator="cpu", max_epochs=10**6, callbacks=[ModelCheckpoint(every=10**9)])
fit.run(Net(), [torch.ones(2, 1)] * 8)
"""


@pytest.mark.parametrize("ranks", [pytest.param("01", marks=pytest.mark.slow), "1"])
def test_an_error_is_told_once_with_the_users_lines(tmp_path: Path, ranks: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    ran = subprocess.run(
        [sys.executable, "train.py", ranks],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1
    lines = [line.removeprefix("[rank0]: ") for line in ran.stderr.splitlines()]
    assert lines.count("Traceback (most recent call last):") == 1
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert files == [str(tmp_path / "train.py")] * 2  # the call of run, and training_step
    other = "rank 1: ValueError: bad luck" if ranks == "01" else "rank 0: was ended because of it"
    assert [line for line in lines if "bad luck" in line or "because" in line] == [
        '    raise ValueError("bad luck")',
        "ValueError: bad luck",
        other,
    ]
    assert len(lines) <= 12, ran.stderr


def test_ctrl_c_ends_with_one_line_and_status_130(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    process = subprocess.Popen(
        [sys.executable, "train.py", "interrupt"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=300)
    (saved,) = (tmp_path / "runs" / "checkpoints").glob("step=*")
    assert process.returncode == 130
    assert err.splitlines() == [
        "Ctrl-C: the run ends after this step; press it again to end at once",
        f"Ctrl-C: the training ended after step {int(saved.name[5:])}, saved in {saved}; "
        'resume="last" (fit run: --resume last) continues from it',
    ]


LAUNCH = ["-m", "engine.cli.main", "launch", "--nproc", "2", "--max-restarts", "1", "train.py"]


@pytest.mark.parametrize("command", [["train.py"], pytest.param(LAUNCH, marks=pytest.mark.slow)])
def test_ctrl_c_on_one_rank_ends_all_with_130(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    ran = subprocess.run(
        [sys.executable, *command, "interrupt rank 1"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 130, ran.stderr
    (saved,) = (tmp_path / "runs" / "checkpoints").glob("step=*")
    lines = [line.removeprefix("[rank 0] ") for line in ran.stderr.splitlines() if not line.startswith("fit launch:")]
    assert lines == [
        f"Ctrl-C: the training ended after step {int(saved.name[5:])}, saved in {saved}; "
        'resume="last" (fit run: --resume last) continues from it',
    ]


SPAWNS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, i):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

fit = Fit(devices=2, accelerator="cpu", max_epochs=1, callbacks=[])
if GUARD:
    data = TensorDataset(torch.ones(8, 1))
    loader = DataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")
    result = fit.run(Net(), loader, loader)
    print(f"steps {result.step}\\n", end="")  # in one write: two processes share the pipe
"""


@pytest.mark.parametrize("guard", ["__name__ == '__main__'", pytest.param("True", marks=pytest.mark.slow)])
def test_spawned_workers_import_a_script_with_a_fit(tmp_path: Path, guard: str) -> None:
    (tmp_path / "train.py").write_text(SPAWNS.replace("GUARD", guard))
    command = [sys.executable, "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300)
    if guard == "True":
        assert ran.returncode == 1
        assert "imports this script and would train as well: put what the script does" in ran.stderr
        assert "inherited the variables" not in ran.stderr
    else:
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "steps 2\nsteps 2\n"
        (warning,) = [line for line in ran.stderr.splitlines() if "Warning" in line]  # once, at the user's line
        assert warning.startswith(f"{tmp_path / 'train.py'}:19: UserWarning: Net has no validation_step")


def ranks_devices(root: str) -> list[str]:
    found = []
    for settings in (
        {"devices": 3},
        {"devices": [0, 1, 2]},
        {"devices": 2, "num_nodes": 2},
        {"devices": "auto", "strategy": "single"},
    ):
        try:
            fit(root, **settings).run(Weight(), ones(2))
        except ValueError as error:
            found.append(str(error))
    fit(root, devices=2).run(Weight(), ones(2))
    return found


def test_requests_that_torchrun_does_not_meet_are_errors(tmp_path: Path) -> None:
    for three, indices, nodes, single in ranks_of(ranks_devices, 2, tmp_path):
        assert (
            "devices=3 was asked for, but fit launch or torchrun has started 2 process(es) on this machine (read: WORLD_SIZE='2'"
            in three
        )
        assert "MASTER_PORT" not in three
        assert "leave devices out, or start as many" in three
        assert "has started 2 process(es)" in indices
        assert "num_nodes=2 was asked for, but fit launch or torchrun has started 1 node(s)" in nodes
        assert "strategy='single' was asked for, but this job has 2 processes; use strategy='ddp' or 'auto'" in single


def test_requests_that_one_process_does_not_meet_are_errors(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"num_nodes=2: several machines need a launcher; .*torchrun --nnodes 2 --nproc-per-node 3"
    ):
        fit(tmp_path, num_nodes=2, devices=3).run(Weight(), ones(1))
    with pytest.raises(
        ValueError, match="strategy='single' and devices=2: one process cannot use 2 devices; use strategy='ddp'"
    ):
        fit(tmp_path, devices=2, strategy="single").run(Weight(), ones(1))
    with pytest.raises(
        RuntimeError, match=r"2 processes were requested.*it is a pytest session.*torchrun --nproc-per-node 2"
    ):
        fit(tmp_path, devices=2).run(Weight(), ones(1))
