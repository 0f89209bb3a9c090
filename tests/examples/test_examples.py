"""The examples as a user runs them: other processes, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(folder, *command, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(text):
    found = re.findall(r"test accuracy: ([\d.]+)%", text)
    assert found, text
    return [float(value) for value in found]


def test_raw_loop_differs_from_plain_pytorch_in_four_lines():
    marks = re.findall(r"# changed: line (\d) of 4", (EXAMPLES / "raw_loop.py").read_text())
    assert marks == ["1", "2", "3", "4"]


def test_digits_for_one_epoch(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 1, "--devices", 1)
    assert accuracy(text)[0] > 50
    assert (tmp_path / "runs" / "digits" / "metrics.csv").exists()


def test_finetune_for_two_epochs(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "finetune.py", "--max-epochs", 2, "--unfreeze-at", 1)
    assert accuracy(text)[0] > 80
    assert (tmp_path / "runs" / "finetune" / "exported" / "model.safetensors").exists()


def test_optuna_ends_bad_trials_early(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    text = run(tmp_path, EXAMPLES / "optuna_digits.py", "--trials", 6, "--max-epochs", 2)
    completed, pruned = map(int, re.search(r"(\d+) trials completed, (\d+) pruned", text).groups())
    assert completed + pruned == 6
    assert pruned > 0
    assert float(re.search(r"best validation accuracy: ([\d.]+)%", text)[1]) > 50


def test_gpt_for_a_few_steps(tmp_path):
    text = run(tmp_path, EXAMPLES / "gpt.py", "--max-steps", 4)
    assert re.search(r"[\d,]+ tokens/s", text)
    assert float(re.search(r"([\d.]+) bits per byte", text)[1]) < 8


STRATEGIES = {
    "ddp": 2, "fsdp": 2, "fsdp_hybrid": 4, "tp": 2, "tp_fsdp": 4, "pp": 2, "pp_ddp": 4, "pp_fsdp": 4,
    "deepspeed_stage_0": 2, "deepspeed_stage_1": 2, "deepspeed_stage_2": 2, "deepspeed_stage_3": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpt_under_every_strategy_by_its_argument_alone(tmp_path, strategy):
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    text = run(
        tmp_path, EXAMPLES / "gpt.py", "--max-steps", 12, "--strategy", strategy, "--devices", STRATEGIES[strategy]
    )
    # 12 steps of a right training come to about 5.6 bits from 8; the same seed, another global batch.
    assert 5 < float(re.search(r"([\d.]+) bits per byte", text)[1]) < 5.9


@pytest.mark.slow
def test_digits_on_two_processes(tmp_path):
    pytest.importorskip("sklearn")
    text = run(tmp_path, EXAMPLES / "digits.py")
    assert len(accuracy(text)) == 1
    assert accuracy(text)[0] >= 97


@pytest.mark.slow
def test_digits_resumes(tmp_path):
    pytest.importorskip("sklearn")
    run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 3)
    text = run(tmp_path, EXAMPLES / "digits.py", "--max-epochs", 6, "--resume", "--devices", 1)
    assert "epoch 3:" in text
    assert "epoch 0:" not in text
    assert accuracy(text)[0] > 90


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_raw_loop(tmp_path, processes):
    pytest.importorskip("sklearn")
    launcher = (
        () if processes == 1 else ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    )
    found = accuracy(run(tmp_path, *launcher, EXAMPLES / "raw_loop.py"))
    assert len(found) == processes
    assert min(found) >= 95


@pytest.mark.slow
def test_gpt_learns(tmp_path):
    text = run(tmp_path, EXAMPLES / "gpt.py", "--max-steps", 100, "--devices", 2)
    # 100 steps reach well below the 4.7 bits that byte frequencies alone give.
    assert float(re.search(r"([\d.]+) bits per byte", text)[1]) < 4.2
