"""``fit replay``: a step of a run of ``fit run``, without naming what ran, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from engine import Fit, TrainModule
from engine.cli.main import main


class Line(TrainModule):
    def __init__(self, slope: float = 0.0, lr: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.tensor(slope))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).sum()
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def numbers(count: int = 8) -> DataLoader[Tensor]:
    return DataLoader(torch.arange(1.0, count + 1), 2)  # type: ignore[arg-type]


HERE = f"{__file__}:Line"
DATA = f"{__file__}:numbers"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Weights of steps 0 to 4: 0, -0.75, -2.5, -5.25, -9; checkpoints of steps 2 and 4."""
    options = ["--callback", "ModelCheckpoint", "--set", f"root_dir={tmp_path}", "max_epochs=1"]
    more = ["callbacks.ModelCheckpoint.every=2", "callbacks.ModelCheckpoint.save_top_k=-1"]
    assert main(["run", HERE, "--data", DATA, *options, *more]) == 0
    return tmp_path


def test_a_step_of_a_run_by_name(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert main(["replay", str(made), "--step", "4", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["samples"] == [6, 7]
    assert found["losses"] == [[-5.25 * 15]]
    assert (found["grad_norm"], found["grad_norms"]) == (15.0, {"weight": 15.0})
    assert found["metrics"] == {"loss": -5.25 * 15}
    assert main(["replay", str(made), "--step", "3", "--per-layer", "--detect-anomaly"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        f"step 3 (epoch 0) from {made}/checkpoints/step=00000002, 1 rank(s)",
        "samples: 4, 5",
        "rank 0, micro-batch 0: loss -27.5",
        "logged: loss = -27.5",
        "gradient norm: 11.0",
        "  weight  11",
        "first number that is not finite: none",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "2"], "no checkpoint from before step 2 (it has those of steps: 2, 4)"),
        (["--step", "0"], "steps are numbered from 1"),
        (["--step", "9"], "the run ends at step 4: max_epochs=1 reached"),
        (["--step", "4", "--set", "model.lrr=1"], "lrr"),
    ],
)
def test_what_cannot_be_replayed(
    made: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["replay", str(made), *arguments]) != 0
    assert words in capfd.readouterr().err


def test_a_run_of_a_script_needs_the_target(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from callbacks import ModelCheckpoint

    saves = ModelCheckpoint(every=2, save_top_k=-1)
    Fit(max_epochs=1, root_dir=tmp_path, callbacks=saves).run(Line(slope=1.0), numbers())
    assert main(["replay", str(tmp_path), "--step", "4"]) == 2
    assert "name its module with --target and its data with --data" in capfd.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "4", "--target", HERE, "--data", DATA, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["losses"] == [[(1 - 5.25) * 15]]
