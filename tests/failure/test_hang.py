"""Jobs that stand still, ranks at odds, and ranks that fail before anything is shared: all processes end soon, and the cause is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.ranks import Ran, run_ranks

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

SCRIPT = """
import logging, os, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from engine import Callback, Fit, TrainModule
from engine.distributed import watchdog

mode, root = sys.argv[1:]
event = SimpleNamespace()
callbacks = []

class Alone(Callback):
    def on_train_batch_start(self, run, module, batch, batch_idx):
        Path(root, f"pid{run.rank}").write_text(str(os.getpid()))
        if run.step == 4 and run.rank == 0:
            run.latest_metrics()  # the call that one rank makes

class Terminate(logging.Handler):
    def emit(self, record):
        if "all ranks wait" in record.getMessage():
            os.kill(int(Path(root, f"pid{mode[-1]}").read_text()), signal.SIGTERM)

if mode == "planted":
    callbacks = [Alone()]
    def look(self):
        raise SystemExit("planted")
    if os.environ["RANK"] == "1":
        watchdog.Watchdog.look = look
if mode.startswith(("alone", "blocks")):
    watchdog.WAIT_S = watchdog.GRACE_S = 2.0
    for handler in (logging.StreamHandler(), Terminate()):
        logging.getLogger("engine").addHandler(handler)
    if mode.startswith("alone"):
        callbacks = [Alone()]
    else:
        Path(root, "pid0").write_text(str(os.getpid()))

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        if mode.startswith("blocks"):
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def configure_model(self):
        if mode == "early" and self.global_rank == 1:
            raise OSError("no such file: weights")

    def training_step(self, batch, batch_idx):
        if mode == "sleep" and batch_idx == 3 and self.global_rank == 1:
            time.sleep(600)  # the line that hangs
        if mode == "spin" and batch_idx == 3 and self.global_rank == 0:
            while True:
                sum(range(100))
        if mode == "device" and batch_idx == 3:
            if self.global_rank == 0:
                lock = threading.Lock()  # its second acquire blocks as a device's event does: in C, without processor time
                lock.acquire()
                event.synchronize = lock.acquire
                event.synchronize()
            while True:
                sum(range(100))  # the line that works
        if mode == "shapes" and batch_idx == 3:
            dist.all_reduce(torch.ones(3 + self.global_rank))
        if mode == "dtypes" and batch_idx == 3:
            dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][self.global_rank]))
        if mode == "missing" and batch_idx == 3 and self.global_rank == 0:
            dist.barrier()
        values = batch[0]
        if mode.startswith("blocks"):
            one_more = [1] if batch_idx == 3 and self.global_rank == 1 else []
            for number in [0, 2, *one_more]:
                values = values + self.experts[number](values)
        loss = self.layer(values).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

options = {"debug": True} if mode in ("shapes", "dtypes", "missing", "fine") else {}
if mode.startswith("blocks"):
    options = {"strategy": mode.split()[1]}
timeout = "10 min" if mode.startswith(("alone", "blocks")) else "2 s"
fit = Fit(max_epochs=1, accelerator="cpu", callbacks=callbacks, timeout=timeout, check=mode == "fine", root_dir=root, log_every_n_steps=1, **options)
result = fit.run(Net(), DataLoader(TensorDataset(torch.randn(64, 4)), 4, shuffle=True))
report(result.step)
"""


def run(mode: str, root: Path) -> list[Ran]:
    return run_ranks(SCRIPT, 2, mode, root, check=False, timeout=300)


def test_a_sleeping_rank_is_named_with_its_line(tmp_path: Path) -> None:
    ran = run("sleep", tmp_path)
    for rank in ran:
        assert rank.returncode == 1
        assert (
            rank.seconds < 120
        )  # of which the limit is 2, the start some, and the end at most 10; without one it would last forever
        assert "no batch was finished for 2" in rank.stderr
        assert "lags: rank 1 (host " in rank.stderr
        assert "in training_step: time.sleep(600)  # the line that hangs" in rank.stderr
    assert "waits: rank 0: " in ran[0].stderr
    assert "lags: rank 0" not in ran[0].stderr + ran[1].stderr
    assert "time.sleep(600)" in (tmp_path / "hang" / "rank=1.txt").read_text()
    assert "backward" in (tmp_path / "hang" / "rank=0.txt").read_text()


def test_a_rank_that_waits_for_its_device_is_not_blamed(tmp_path: Path) -> None:
    ran = run("device", tmp_path)
    assert [rank.returncode for rank in ran] == [1, 1]
    report = ran[0].stderr
    assert "lags: rank 1 (host " in report
    assert "lags: rank 0" not in report
    waits = next(line for line in report.splitlines() if "waits: rank 0: " in line)
    assert "in training_step: event.synchronize() (waits for its device)" in waits
    works = next(line for line in report.splitlines() if "lags: rank 1 " in line)
    assert "sum(range(100))  # the line that works (uses " in works


@pytest.mark.slow
def test_a_rank_that_runs_in_circles_gets_the_error_at_its_line(tmp_path: Path) -> None:
    ran = run("spin", tmp_path)
    assert [rank.returncode for rank in ran] == [1, 1]
    assert "lags: rank 0 (host " in ran[1].stderr
    assert "Stacks of every rank" in ran[0].stderr.rstrip().splitlines()[-1]
    assert "sum(range(100))" in ran[0].stderr


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("shapes", ["0     allreduce   [3]    float", "1     allreduce   [4]    float"]),
        pytest.param(
            "dtypes", ["0     allreduce   [2]    float", "1     allreduce   [2]    double"], marks=pytest.mark.slow
        ),
    ],
)
def test_debug_names_what_each_rank_gave(tmp_path: Path, mode: str, rows: list[str]) -> None:
    ran = run(mode, tmp_path)
    for rank in ran:
        assert rank.returncode == 1
        assert "MismatchError" in rank.stderr
        for row in rows:
            assert row in rank.stderr
        assert rank.stderr.count("in training_step: dist.all_reduce(torch.ones") >= 2


@pytest.mark.slow
def test_a_collective_that_one_rank_leaves_out(tmp_path: Path) -> None:
    ran = run("missing", tmp_path)
    assert [rank.returncode for rank in ran] == [1, 1]
    assert "all ranks wait for each other, in different collectives" in ran[0].stderr
    assert "rank 0 (host " in ran[0].stderr
    assert "in training_step: dist.barrier()" in ran[0].stderr


@pytest.mark.parametrize("terminated", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_that_wait_for_each_other_are_named_and_end_after_sigterm(terminated: int, tmp_path: Path) -> None:
    """The call of one rank alone keeps it waiting, in native code, where no handler of a signal runs; the others wait in the next step."""
    ran = run(f"alone {terminated}", tmp_path)
    assert [rank.returncode for rank in ran] == [143, 143]
    assert all(rank.seconds < 120 for rank in ran)
    told = ran[0].stderr
    assert told.count("and all ranks wait, for each other or for their devices") == 1
    assert "waits: rank 0: " in told
    assert "in on_train_batch_start: run.latest_metrics()  # the call that one rank makes" in told
    assert "waits: rank 1: " in told
    assert "SIGTERM has come, and no batch was finished for " in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "waits"),
    [
        # Rank 1 has an expert more, after those of both ranks: in another order than the model's.
        ("fsdp", "because it begins the forward pass of block experts.1 at a place where no rank did so before"),
        pytest.param(
            "deepspeed_stage_3", "forward pass of layer at a place where no rank did so before", marks=needs_deepspeed
        ),
    ],
)
def test_the_block_is_named_for_which_ranks_wait(strategy: str, waits: str, tmp_path: Path) -> None:
    ran = run(f"blocks {strategy} 0", tmp_path)
    assert all(rank.returncode == 143 and rank.seconds < 200 for rank in ran)
    told = ran[0].stderr
    assert "or runs other blocks of a model that FSDP or ZeRO 3 shards" in told
    lines = [line for line in told.splitlines() if line.startswith("  waits: rank ")]
    assert len(lines) == 2
    assert waits in lines[1]
    for line in lines:
        assert "it gathers or reduces " in line or waits in line


def test_a_living_rank_whose_watchdog_fails_is_not_called_lost(tmp_path: Path) -> None:
    ran = run("planted", tmp_path)
    assert [rank.returncode for rank in ran] == [1, 1]
    assert "lost: rank 1" not in ran[0].stderr
    silent = next(line for line in ran[0].stderr.splitlines() if "silent: rank 1 (host " in line)
    assert "its process runs, but its watchdog gives no answer" in silent
    assert ran[1].stderr.count("the watchdog could not look at the training") == 1


def test_check_and_debug_let_a_sound_run_pass(tmp_path: Path) -> None:
    assert [rank.value for rank in run("fine", tmp_path)] == [8, 8]


def test_failing_before_the_first_collective(tmp_path: Path) -> None:
    ran = run("early", tmp_path)
    assert all(rank.returncode == 1 and rank.seconds < 120 for rank in ran)  # without an end it would last forever
    assert "OSError: no such file: weights" in ran[1].stderr
