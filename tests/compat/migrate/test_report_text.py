"""The report as a person reads it."""

from __future__ import annotations

from pathlib import Path

from reported import report_of

from engine.compat.migrate.report_text import lines

TEXT = """\
import lightning as L


class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        self.log("a", 1.0)
        self.log("b", 1.0)

    def training_epoch_end(self, outputs): ...


class Heir(Net):
    def on_fit_end(self): ...


L.Trainer().fit(Net())
"""


def test_everything(tmp_path: Path) -> None:
    assert list(lines(report_of(tmp_path, net=TEXT))) == [
        f"{tmp_path}/net.py",
        "  class Net (LightningModule): needs a change",
        "    as is:   LightningModule 4; def training_step 5; LightningModule.log 6, 7",
        "    change:  line 9: def training_epoch_end: it is never called: define on_train_epoch_end, with what training_step kept in an attribute",
        "  class Heir (LightningModule): needs a change (inherited from Net)",
        "    as is:   def on_fit_end 13",
        "  outside classes",
        "    as is:   Trainer 16",
        "    interop: Trainer.fit 16",
        "",
        "package                 classes                  count   as is  interop  change  inherited",
        "net                     LightningModules             2       0        0       1          1",
        "all files               uses                         8       6        1       1",
        "",
        "'as is': trains under Fit and Engine without a change",
        "'interop': works once it is imported from there: `import engine.interop.lightning as L`, "
        "`from engine.interop.accelerate import Accelerator`",
        "'change': the sentence beside the line says what to use instead",
    ]


def test_a_file_that_uses_nothing_of_theirs(tmp_path: Path) -> None:
    *_, last = lines(report_of(tmp_path, net="import torch\n"))
    assert last.startswith("No use of Lightning, Accelerate or transformers.Trainer was found")


def test_changes_only(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("\nclass:")
    found = list(lines(report_of(tmp_path, net=TEXT), changes_only=True))
    assert [each for each in found if "as is:" in each or "interop:" in each] == []
    assert sum("change:" in each for each in found) == 1
    assert f"not read: {tmp_path}/bad.py:2: not valid Python: invalid syntax" in found
