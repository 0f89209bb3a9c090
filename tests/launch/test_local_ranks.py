"""The processes of a run: ``devices=2`` in a plain script, ranks that die, and requests that cannot be met."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import Weight, fit, on_ranks, ones
from processes import run_script

SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import os, time
import torch
from torch.utils.data import DataLoader
from models import Weight, fit

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
    for three, indices, nodes, single in on_ranks(ranks_devices, 2, tmp_path):
        assert "devices=3 was asked for, but torchrun has started 2 process(es) on this machine (read: RANK='" in three
        assert "leave devices out, or start as many" in three
        assert "has started 2 process(es)" in indices
        assert "num_nodes=2 was asked for, but torchrun has started 1 node(s)" in nodes
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
