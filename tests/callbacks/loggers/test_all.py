"""Every logger: a job on two ranks that is killed and resumed, and then evaluated, is read back with the tracker's own reader."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import run_ranks
from readers import READERS, Entry

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
root, kill, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
import torch
import callbacks
from callbacks import ModelCheckpoint
from engine import Callback, Fit
from models import Weight, ones

class Logs(Weight):
    def training_step(self, batch, batch_idx):
        self.log("train/loss", float(self.global_step) / 8)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.w.detach()[0] * 0 + 0.5)
    def on_validation_epoch_end(self):
        if self.run.stage == "fit" and self.run.is_main_process and self.run.step == 2:
            for logger in loggers:
                if "image" in logger.takes:
                    logger.on_media(self.run, "image", "gray", torch.full((1, 2, 3), 0.5))
                if "text" in logger.takes:
                    logger.on_media(self.run, "text", "note", "a word")
    def test_step(self, batch, batch_idx):
        self.log("test/loss", 0.25)

class Kills(Callback):
    def on_log(self, run, module, metrics, step):
        if step == kill and "train/loss" in metrics:
            while run.is_main_process and any(logger._sender.waiting() for logger in loggers):
                time.sleep(0.01)
            run.engine.wait_for_everyone()
            os.kill(os.getpid(), signal.SIGKILL)

loggers = [getattr(callbacks, name)() for name in names]
checkpoint = ModelCheckpoint(every="3 steps", asynchronous=False)
module = Logs()
fit = Fit(strategy="ddp", devices="auto", accelerator="cpu", num_sanity_val_steps=0, root_dir=root, max_steps=8, log_every_n_steps=1,
          val_every="2 steps", callbacks=[*loggers, Kills(), checkpoint])
result = fit.run(module, [torch.ones(2, 1)] * 32, ones(2), resume="auto")
fit.validate(module, ones(2), checkpoint=result.last_checkpoint)
fit.test(module, ones(2), checkpoint=result.last_checkpoint)
report(str(result.folder))
"""

QUICK = ("CSVLogger", "JSONLLogger", "TensorBoardLogger")
SLOW = tuple(name for name in READERS if name not in QUICK)

TRAINED = sorted(
    [("train/loss", step, (step - 1) / 8) for step in range(1, 9)] + [("val/loss", step, 0.5) for step in (2, 4, 6, 8)]
)
EVALUATED = [("test/loss", 8, 0.25), ("val/loss", 8, 0.5)]


def killed_and_resumed(names: tuple[str, ...], root: Path) -> Path:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + SCRIPT
    ran = run_ranks(script, 2, root, 5, ",".join(names), check=False)
    assert [rank.returncode for rank in ran] == [-signal.SIGKILL] * 2, ran
    return Path(run_ranks(script, 2, root, -1, ",".join(names))[0].value)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_and_resumed(QUICK, tmp_path_factory.mktemp("quick"))


def check(entries: list[Entry]) -> None:
    """``entries``: name, step, value of everything in the tracker."""
    wanted = [entry for entry in entries if entry[0] in ("train/loss", "val/loss", "test/loss")]
    assert sorted(wanted) == sorted([*TRAINED, *EVALUATED])
    assert {(step, value) for name, step, value in entries if name == "epoch"} == {(step, 0) for step in range(1, 9)}


@pytest.mark.parametrize("name", QUICK)
def test_nothing_twice_and_nothing_missing(quick: Path, name: str) -> None:
    check(READERS[name](quick))
