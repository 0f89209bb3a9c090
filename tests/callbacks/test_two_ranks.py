"""The callbacks on two processes: one file, one line, the same decisions on both ranks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from support.ranks import run_script

SCRIPT = """
import gc, json, os, pathlib, pickle, sys, time, weakref
import torch
from torch.utils.data import DataLoader, TensorDataset
from callbacks import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from engine import Fit, TrainModule

SCORES = [1.0, 0.5, 0.75, 0.875, 0.1]


class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch[0]).mean()
        self.log("train/weight", self.weight.detach()[0], prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", SCORES[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


root = pathlib.Path(sys.argv[1])
often = ModelCheckpoint(every="0.0001 s")
best = ModelCheckpoint(monitor="score", save_last=False)
stopping = EarlyStopping("score", patience=2)
fit = Fit(accelerator="cpu", devices=2, max_epochs=5, num_sanity_val_steps=0, log_every_n_steps=2, root_dir=root,
          callbacks=[RichProgressBar(), CSVLogger(), LearningRateMonitor(), stopping, often, best])
data = TensorDataset(torch.ones(16, 1))
result = fit.run(Model(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))

def two_folders(epochs):
    best = ModelCheckpoint(monitor="score", save_last=False, dirpath=root / "best")
    return Fit(accelerator="cpu", devices=2, max_epochs=epochs, num_sanity_val_steps=0, root_dir=root / "two",
               callbacks=[best, ModelCheckpoint(every="3 steps", dirpath=root / "all")])


two_folders(2).run(Model(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
resumed = two_folders(3).run(Model(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2), resume="last")
module, kept = Model(), ModelCheckpoint()
Fit(accelerator="cpu", devices=2, max_epochs=1, num_sanity_val_steps=0, root_dir=root / "released", callbacks=[kept]).run(
    module, DataLoader(data, batch_size=2)
)
module, deadline = weakref.ref(module), time.monotonic() + 30
while module() is not None and time.monotonic() < deadline:  # a helper thread may be ending still
    gc.collect()
rank = os.environ.get("RANK", "0")
(root / f"rank{rank}.json").write_text(json.dumps({
    "step": result.step, "reason": result.stop_reason, "best": str(result.best_checkpoint), "last": str(result.last_checkpoint),
    "two": [resumed.step, str(resumed.best_checkpoint), str(resumed.last_checkpoint)],
    "released": module() is None, "copied": pickle.loads(pickle.dumps(kept)).scores == kept.scores,
    "scores": best.scores, "often": list(often.scores), "wait": stopping.wait_count,
}))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder and output of a run on two processes, which the script starts itself."""
    root = tmp_path_factory.mktemp("two_ranks")
    (root / "script.py").write_text(SCRIPT)
    with contextlib.chdir(root):
        return root, run_script(Path("script.py"), root, forked=True).stdout


def test_both_ranks_decide_the_same(finished):
    root, _ = finished
    first, second = (json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    # 4 steps an epoch; best in epoch 1, no better in epochs 2 and 3: the second of them ends it.
    assert (first["step"], first["wait"]) == (16, 2)
    assert "score did not improve" in first["reason"]
    assert first["scores"] == {"8": 0.5}
    assert first["best"].endswith("step=00000008")
    assert first["last"].endswith("step=00000016")


def test_two_folders(finished):
    root, _ = finished
    expected = [12, str(root / "best" / "step=00000008"), str(root / "all" / "step=00000012")]
    for rank in (0, 1):
        assert json.loads((root / f"rank{rank}.json").read_text())["two"] == expected


def test_after_the_training_a_callback_keeps_neither_the_module_nor_the_ranks(finished):
    root, _ = finished
    for rank in (0, 1):
        facts = json.loads((root / f"rank{rank}.json").read_text())
        assert (facts["released"], facts["copied"]) == (True, True)


def test_the_checkpoints_are_those_that_the_callbacks_hold(finished):
    root, _ = finished
    held = json.loads((root / "rank0.json").read_text())
    there = {path.name for path in (root / "checkpoints").iterdir()}
    assert there == {f"step={step:08d}" for step in {8, *held["often"]}}


def test_one_process_writes_and_prints(finished):
    root, output = finished
    lines = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 4
    rows = (root / "metrics.csv").read_text().splitlines()
    steps = [int(row.split(",")[0]) for row in rows[1:]]
    assert steps == sorted(steps)
    assert steps.count(2) == 1
    assert "lr-SGD" in rows[0]
