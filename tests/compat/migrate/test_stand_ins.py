"""Stand-ins are as the classes that they stand for, and the report needs nothing else."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from engine.compat.migrate.signatures import Member, member, signature
from engine.compat.migrate.stand_ins import FILE, stand_in

PROJECT = """\
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

class Net(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0, on_epoch=True, reduce_fx="mean")
    def on_train_batch_end(self, outputs, batch, batch_idx): ...

checkpoint = ModelCheckpoint(monitor="loss", mode="min", save_top_k=3)
callbacks = [checkpoint, EarlyStopping("loss", patience=2), LearningRateMonitor("step"), TQDMProgressBar(refresh_rate=2)]
pl.Trainer(max_epochs=3, callbacks=callbacks, logger=CSVLogger("logs"), profiler="simple", val_check_interval=0.5).fit(Net())
"""


def test_the_file_is_that_of_the_classes() -> None:
    """Another version of torch has other classes of its own, and another Python other members of each class.

    A process of its own writes the table: packages that other tests import here change torch's classes.
    """
    written = subprocess.run(
        [sys.executable, Path(__file__).with_name("write_stand_ins.py"), "--print"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    there, live = json.loads(FILE.read_text()), json.loads(written)
    if there["python"] != live["python"]:
        pytest.skip(f"the file was written under Python {there['python']}")
    for found in (there, live):
        found["classes"] = {key: entry for key, entry in found["classes"].items() if not key.startswith("torch.")}
    assert there == live, "out of date: python tests/compat/migrate/write_stand_ins.py"


def _seen(found: Member | None) -> Any:
    if found is None:
        return None
    kinds = None if found.call is None else [(each.name, each.kind) for each in found.call.parameters.values()]
    return found.settable, kinds, found.type and found.type.__name__


@pytest.mark.parametrize(
    "name",
    [
        *("engine.Engine", "engine.Fit", "engine.Run", "engine.TrainModule", "engine.Callback", "engine.DataModule"),
        *("callbacks.ModelCheckpoint", "callbacks.ServableModule", "callbacks.loggers.CSVLogger"),
        *("engine.interop.lightning.Trainer", "engine.interop.lightning.callbacks.EMAWeightAveraging"),
        *("engine.interop.lightning.loggers.WandbLogger", "engine.interop.accelerate.Accelerator"),
    ],
)
def test_a_stand_in_answers_as_its_class(name: str) -> None:
    place, _, last = name.rpartition(".")
    live, stand = getattr(importlib.import_module(place), last), stand_in(name)
    names = {
        *dir(live),
        *dir(stand),
        *(each for cls in live.__mro__ for each in inspect.get_annotations(cls)),
        "no_such",
    }
    added = {
        each for each, value in vars(nn.Module).items() if not getattr(value, "__module__", "torch").startswith("torch")
    }
    names = {each for each in names - added if not each.startswith("__")}  # transformers adds a method to torch's class
    different = {each for each in names if _seen(member(live, each)) != _seen(member(stand, each))}
    assert different == set()
    assert [each for each in dir(live) if each[0] != "_" and each not in added] == [
        each for each in dir(stand) if each[0] not in "_" and each != "refused"
    ]
    assert [each.name for each in signature(stand).parameters.values()] == [
        each.name for each in signature(live).parameters.values()
    ]  # type: ignore[union-attr]


def test_a_report_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(PROJECT)
    code = f"import sys; from engine.cli.main import main; main(['migrate', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "change:" not in done.stdout
