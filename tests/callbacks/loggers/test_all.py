"""Every logger: a run that is killed, resumed on two ranks, and then evaluated, is read back with the tracker's own reader."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_ranks
from readers import PACKAGES, READERS, Entry

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
root, kill, names, server = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4]
os.environ["TRACKIO_DIR"] = str(root / "trackio")
os.environ["WANDB_SILENT"] = "true"
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
            while any(logger._sender.waiting() for logger in loggers):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

OPTIONS = {
    "MLflowLogger": {"tracking_uri": server, "artifact_location": str(root / "artifacts")},
    "WandbLogger": {"project": "p", "mode": "offline"},
    "AimLogger": {"repo": root / "aim"},
    "CometLogger": {"online": False},
}
loggers = [getattr(callbacks, name)(**OPTIONS.get(name, {})) for name in names]
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


def killed_and_resumed(names: tuple[str, ...], root: Path, server: str = "") -> Path:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + SCRIPT
    ran = run_ranks(script, 1, root, 5, ",".join(names), server, check=False)[0]
    assert ran.returncode == -signal.SIGKILL, ran
    return Path(run_ranks(script, 2, root, -1, ",".join(names), server)[0].value)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_and_resumed(QUICK, tmp_path_factory.mktemp("quick"))


def check(entries: list[Entry], evaluated: list[Entry] = EVALUATED) -> None:
    """``entries``: name, step, value of everything in the tracker."""
    wanted = [entry for entry in entries if entry[0] in ("train/loss", "val/loss", "test/loss")]
    assert sorted(wanted) == sorted([*TRAINED, *evaluated])
    assert {(step, value) for name, step, value in entries if name == "epoch"} == {(step, 0) for step in range(1, 9)}


@pytest.mark.parametrize("name", QUICK)
def test_nothing_twice_and_nothing_missing(quick: Path, name: str) -> None:
    check(READERS[name](quick, ""))


@pytest.fixture(scope="module")
def trackers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = tuple(name for name in SLOW if find_spec(PACKAGES[name]))
    root = tmp_path_factory.mktemp("trackers")
    return killed_and_resumed(names, root, f"sqlite:///{root}/mlflow.db")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trackers' packages
@pytest.mark.parametrize("name", SLOW)
def test_nothing_twice_and_nothing_missing_in_a_tracker(trackers: Path, name: str) -> None:
    pytest.importorskip(PACKAGES[name])
    # Of several values of one name at one step, Aim keeps the last.
    check(READERS[name](trackers, f"sqlite:///{trackers}/mlflow.db"), EVALUATED[: 1 if name == "AimLogger" else 2])
