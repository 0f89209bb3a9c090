"""``~`` is the home directory in every path that a user gives; no folder of this name is made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones

from callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, PredictionWriter, Report, SimpleProfiler
from callbacks.loggers import LoggedLoop
from engine import Engine, Resume
from engine.checkpoint.catalog import entries
from engine.checkpoint.export import export_checkpoint
from engine.compat.accelerate.accelerator import Accelerator
from engine.compat.lightning.module import LightningModule
from engine.compat.lightning.trainer import Trainer
from engine.utils.paths import expanded


class Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    return home


def test_a_run_and_its_callbacks(home: Path) -> None:
    callbacks: list[Any] = [
        ModelCheckpoint(dirpath="~/kept"), CSVLogger("~/csv"), JSONLLogger("~/jsonl"), Report("~/page/report.html"),
        SimpleProfiler(dirpath="~/profile", filename="times"),
    ]  # fmt: skip
    fit("~/runs", callbacks=callbacks).run(Logs(), ones(2))
    for name in ("runs", "kept/step=00000002", "csv/metrics.csv", "jsonl/metrics.jsonl", "page/report.html", "profile"):
        assert (home / name).exists(), name
    for resume in ("~/kept", "~/kept/step=00000002", Path("~/kept"), Resume("~/kept/step=00000002")):
        assert fit("~/again", max_epochs=2).run(Weight(), ones(2), resume=resume).step == 4
    assert Weight.load_from_checkpoint("~/kept/step=00000002").w.item() == -2.0
    fit("~/runs").validate(Weight(), ones(1), checkpoint="~/kept/step=00000002")
    fit("~/runs", callbacks=PredictionWriter("~/predictions")).predict(Weight(), ones(1))
    assert [entry["step"] for entry in entries("~/kept")] == [2]
    assert export_checkpoint("~/kept", "~/out").files
    assert os.listdir() == []


def test_loops_of_ones_own_and_the_other_doors(home: Path) -> None:
    engine = Engine(accelerator="cpu")
    model = engine.prepare(torch.nn.Linear(1, 1))
    engine.save_state("~/state/one")
    engine.load_state("~/state/one")
    engine.save_model(model, "~/weights")
    with LoggedLoop([CSVLogger()], "~/loop") as log:
        log({"loss": 1.0})
    trainer = Trainer(default_root_dir="~/lightning", max_steps=1, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(Lit(), ones(1))
    trainer.save_checkpoint("~/trainer.ckpt")
    Trainer(default_root_dir="~/lightning", max_steps=1, accelerator="cpu", logger=False).validate(
        Lit(), ones(1), ckpt_path="~/trainer.ckpt"
    )
    accelerator = Accelerator(project_dir="~/project", cpu=True)
    accelerator.save_state("~/accelerate")
    names = {"state", "weights", "loop", "lightning", "trainer.ckpt", "accelerate"}
    assert names <= {path.name for path in home.iterdir()}
    assert os.listdir() == []


def test_only_a_tilde_at_the_start(home: Path) -> None:
    assert expanded("a/~/b") == "a/~/b"
    assert expanded("./~") == "./~"
    assert expanded("s3://bucket/~") == "s3://bucket/~"
    assert expanded(Path("~")) == str(home)
    with pytest.raises(ValueError, match=r"~nobody-is-called-this is no user's home directory; write \./~nobody"):
        fit("~nobody-is-called-this/runs")
