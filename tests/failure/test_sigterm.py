"""SIGTERM on one rank: all finish the step (or leave the validation), save the same step and exit 143; the run resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import clean_environment, run_ranks, run_script

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from torch.utils.data import DataLoader
from callbacks import ModelCheckpoint
from engine import Callback, Fit
from job import Net, Numbered

root, where, resume = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "resume"
rank = int(os.environ.get("RANK", "0"))

class Term(Callback):
    def on_train_batch_start(self, run, module, batch, batch_idx):
        if where == "step" and run.step == 4 and run.rank == 1 and not resume:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, run, module, batch, batch_idx, dataloader_idx=0):
        if where == "validation" and run.epoch == 1 and not resume:
            time.sleep(0.06)
            if batch_idx == 3 and run.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_end(self, run, module):
        if run.epoch == 1:
            (root / f"validated{run.rank}").write_text(str(run.step))

fit = Fit(max_epochs=3, seed=1, devices=2, accelerator="cpu", root_dir=root, accumulate_grad_batches=2, log_every_n_steps=1,
          callbacks=[Term(), ModelCheckpoint(every="3 epochs", monitor="val_loss", save_last=False)])
result = fit.run(Net(), DataLoader(Numbered(), batch_size=4, shuffle=True), DataLoader(Numbered(), batch_size=1), resume="last" if resume else None)
(root / f"result{fit.is_main_process}").write_text(f"{result.step} {result.status} {result.metrics['loss']}")
"""


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").iterdir())


@pytest.mark.parametrize("where", ["step", "validation"])
def test_on_rank_1_only(tmp_path: Path, where: str) -> None:
    args = (Path(__file__).parent, tmp_path, where)
    ran = run_ranks(SCRIPT, 2, *args, "new", check=False, timeout=300)
    assert [rank.returncode for rank in ran] == [143, 143], "\n".join(rank.stderr[-2000:] for rank in ran)
    # 61 samples: 8 micro-batches a rank, 4 steps an epoch. The ranks agree within some steps of this small model.
    (name,) = names(tmp_path)
    manifest = json.loads((tmp_path / "checkpoints" / name / "manifest.json").read_text())
    step = manifest["counters"]["step"]
    assert step == 8 if where == "validation" else 4 <= step < 12
    if where == "validation":
        assert not list(tmp_path.glob("validated*"))  # a validation that was left tells nobody of its results
    path = tmp_path / "checkpoints" / name
    last = f'SIGTERM: the training ended after step {step}, saved in {path}; resume="last" (fit run: --resume last) continues from it'
    assert [rank.stderr.count(last) for rank in ran] == [1, 0]
    assert not list(tmp_path.glob("result*"))
    run_ranks(SCRIPT, 2, *args, "resume", timeout=300)
    assert (tmp_path / "resultTrue").read_text().startswith("12 completed")
    assert (tmp_path / "validated0").read_text() == "8"  # also the one that was left


@pytest.mark.slow
def test_processes_that_fit_has_started(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command: list[Any] = [sys.executable, script, Path(__file__).parent, tmp_path, "step", "new"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 143, done.stderr
    assert "RankError" not in done.stderr
    assert len(names(tmp_path)) == 1
    assert os.environ.get("RANK") is None


HANGS = """
import logging, os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from callbacks.loggers.base import Logger
from engine.distributed import watchdog
from support.toys import Weight, fit, ones

class Terminate(logging.Handler):
    def emit(self, record):
        if "still being set up" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)

class Hangs(Logger):
    def open(self, run):
        while True:
            time.sleep(600)

watchdog.SETUP_IDLE_S = watchdog.GRACE_S = 1.0
for handler in (logging.StreamHandler(), Terminate()):
    logging.getLogger("engine").addHandler(handler)
fit(sys.argv[1], callbacks=Hangs()).run(Weight(), ones(2))
"""


def test_a_logger_that_does_not_open_is_named_and_ends_with_the_run(tmp_path: Path) -> None:
    ran = run_script(HANGS, tmp_path, Path(__file__).parents[1], check=False, forked=True)
    assert ran.returncode == 143
    assert "the run is still being set up: for " in ran.stderr
    assert "in open: time.sleep(600)" in ran.stderr
    assert "SIGTERM: the run was still being set up after 1 s, at " in ran.stderr
