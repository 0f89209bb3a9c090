"""The core works without the folders that stand on it: a copy of the packages lacks them, and trains, saves and resumes there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.ranks import ROOT, run_script

LEFT_OUT = ("strategies/deepspeed",)
"""Folders of ``engine`` that the copy lacks."""

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import engine
from callbacks import ModelCheckpoint
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

def trained(folder, epochs, resume=None):
    fit = Fit(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, seed=3, root_dir=folder, callbacks=[ModelCheckpoint()])
    module = Net()
    fit.run(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4), resume=resume)
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()

if __name__ == "__main__":
    root, devices, strategy = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator))
    whole = trained(root / "whole", 2)
    trained(root / "resumed", 1)
    resumed = trained(root / "resumed", 2, resume="last")
    report({"package": engine.__file__, "whole": whole, "resumed": resumed})
"""


def copy_without(folders: tuple[str, ...], target: Path) -> None:
    """Copy the packages, without these folders of ``engine``."""
    for package in ("engine", "callbacks"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in folders:
        shutil.rmtree(target / "engine" / folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tree")
    copy_without(LEFT_OUT, target)
    return target


@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp")])
def test_a_copy_trains_saves_and_resumes(tree: Path, tmp_path: Path, devices: int, strategy: str) -> None:
    ran = run_script(SCRIPT, tmp_path, devices, strategy, env={"PYTHONPATH": str(tree)})
    assert Path(ran.value["package"]).is_relative_to(tree)
    assert ran.value["resumed"] == ran.value["whole"]


def test_a_strategy_that_is_not_there_is_an_error_that_says_so(tree: Path, tmp_path: Path) -> None:
    ran = run_script(SCRIPT, tmp_path, 1, "deepspeed_stage_2", check=False, env={"PYTHONPATH": str(tree)})
    assert ran.returncode == 1
    assert (
        "ValueError: strategy='deepspeed_stage_2' is not in this installation, which lacks engine.strategies.deepspeed: install the whole "
        "package again; possible: auto, single, ddp, fsdp, tp, pp, mesh, or a Strategy object"
    ) in ran.stderr
