"""Classes by verdict, and the report as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from reported import report_of

from engine.compat.migrate.report import as_json, migration

BASE = "import lightning as L\nclass Base(L.LightningModule):\n    def training_step(self, batch, batch_idx): ...\n"
FILES = {
    "pkg__base": BASE,
    "pkg__data": "import lightning as L\nclass Data(L.LightningDataModule): ...\n",
    "pkg__hook": "from lightning.pytorch import Callback\nclass Tell(Callback):\n    def on_train_start(self, trainer, pl_module):\n"
    "        trainer.callback_metrics\n",
    "pkg__net": "from pkg.base import Base\nclass Net(Base):\n    def training_epoch_end(self, outputs): ...\nclass Heir(Net): ...\n",
    "other__log": "from lightning.pytorch.loggers import Logger\nclass Own(Logger): ...\n",
}


def test_counts(tmp_path: Path) -> None:
    report = report_of(tmp_path, **FILES)
    assert report.counts("module") == {"as is": 1, "interop": 0, "change": 1, "inherited": 1}
    assert report.counts("data", "pkg") == {"as is": 1, "interop": 0, "change": 0, "inherited": 0}
    assert report.counts("callback") == {"as is": 0, "interop": 1, "change": 0, "inherited": 0}
    assert sum(report.counts("other", "other").values()) == 1
    assert not any(report.counts("module", "other").values())
    assert not report.works
    assert report_of(tmp_path / "fresh", net=BASE).works


def test_a_change_of_a_mixin_counts_once(tmp_path: Path) -> None:
    heirs = "".join(f"class Net{i}(Mixin, L.LightningModule): ...\n" for i in range(3))
    mixin = "class Mixin:\n    def training_epoch_end(self, outputs): ...\n"
    report = report_of(tmp_path, net=f"import lightning as L\n{mixin}{heirs}")
    assert report.counts("module") == {"as is": 0, "interop": 0, "change": 1, "inherited": 2}


def test_json(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("class:")
    found = json.loads(json.dumps(as_json(report_of(tmp_path, **FILES))))
    assert found["files"] == len(FILES) + 2  # two __init__.py
    assert [(each["path"], each["line"]) for each in found["unread"]] == [(str(tmp_path / "bad.py"), 1)]
    assert found["summary"]["pkg"]["module"] == {"as is": 1, "interop": 0, "change": 1, "inherited": 1}
    heir = next(each for each in found["classes"] if each["name"] == "Heir")
    assert (heir["kind"], heir["line"], heir["verdict"]) == ("module", 4, "change")
    (change,) = heir["changes"]
    assert change == {
        "path": str(tmp_path / "pkg" / "net.py"),
        "line": 3,
        "class": "Net",
        "library": "lightning",
        "name": "def training_epoch_end",
        "verdict": "change",
        "what": "it is never called: define on_train_epoch_end, with what training_step kept in an attribute",
    }


def test_a_notebooks_uses_have_a_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "code", "source": "x = 1"},
        {"cell_type": "code", "source": "import lightning as L\nL.Trainer()"},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (use,) = as_json(migration([tmp_path]))["uses"]
    assert (use["cell"], use["line"], use["name"]) == (2, 2, "Trainer")


def test_a_file_that_is_nested_too_deeply_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(BASE)
    (tmp_path / "deep.py").write_text("import lightning as L\nx = a" + ".b()" * sys.getrecursionlimit() + "\n")
    report = migration([tmp_path])
    assert report.counts("module")["as is"] == 1
    (unread,) = report.unread
    assert (unread.path.name, unread.message) == ("deep.py", "an expression in it is nested too deeply")
