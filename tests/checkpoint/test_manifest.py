"""Versions of the format: the one before is read, and a run continues from it. ``format_2/`` was written by a version that wrote no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import resummed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Engine, Fit, TrainModule
from engine.checkpoint.catalog import entries
from engine.checkpoint.manifest import JOINED_FORMAT, READABLE
from engine.checkpoint.storage_paths import storage_of

STORED = Path(__file__).parent / "format_2"
DATA = TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)


class Net(TrainModule):
    """As it was when the example was written; ``width`` is among its hyperparameters."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.5), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def run(root: Path, module: Net, resume: Any = None) -> Any:
    fit = Fit(
        accelerator="cpu", root_dir=root, callbacks=[ModelCheckpoint(every=3, save_top_k=-1)], max_steps=6, seed=7
    )
    return fit.run(module, DataLoader(DATA, batch_size=2, shuffle=True), resume=resume)


def loop(start: Path | None, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = Engine(accelerator="cpu", seed=7)
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = engine.prepare(
        model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2)
    )
    if start is not None:
        engine.load_state(start)
    done = 0
    while done < steps:
        for (x,) in loader:
            engine.backward(model(x).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    return model


def close(one: nn.Module, other: nn.Module) -> bool:
    """But for the last bits, in which versions of torch differ."""
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("version", [2, 3])
def test_a_run_goes_on_from_the_format_before(tmp_path: Path, version: int) -> None:
    """Weights, Adam's moments, schedule, order of the data, dropout's random numbers: what a run without an interruption has at its end."""
    assert READABLE == (2, JOINED_FORMAT)
    stored = STORED.with_name(f"format_{version}") / "fit"
    shutil.copytree(stored, tmp_path / "one" / "checkpoints" / "step=00000003")
    resumed, whole = Net(), Net()
    result = run(tmp_path / "one", resumed, "auto")
    run(tmp_path / "two", whole)
    assert result.step == 6
    assert close(resumed, whole)
    assert [entry["step"] for entry in entries(tmp_path / "one")] == [3, 6]
    written = storage_of(tmp_path / "one" / "checkpoints").manifests()
    assert [manifest["format"] for manifest in written.values()] == [version, JOINED_FORMAT]
    assert Net.load_from_checkpoint(stored).hparams == {"width": 2}


@pytest.mark.parametrize("version", [2, 3])
def test_a_loop_goes_on_from_the_format_before(version: int) -> None:
    assert close(loop(STORED.with_name(f"format_{version}") / "engine", 3), loop(None, 6))


def test_of_the_format_before_the_time_tells_which_was_written_last(tmp_path: Path) -> None:
    """And all of them are older than what has a serial number."""
    for name, time in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        shutil.copytree(STORED / "engine", tmp_path / name)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        (tmp_path / name / "manifest.json").write_text(json.dumps(resummed(manifest | {"saved_at": time})))
    assert list(storage_of(tmp_path).manifests()) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("version", "what"),
    [(JOINED_FORMAT + 1, "the newer version that wrote it"), (1, "an older version that still reads it")],
)
def test_other_formats_say_which_version_is_needed(tmp_path: Path, version: int, what: str) -> None:
    shutil.copytree(STORED / "engine", tmp_path / "it")
    manifest = json.loads((tmp_path / "it" / "manifest.json").read_text())
    (tmp_path / "it" / "manifest.json").write_text(json.dumps(resummed(manifest | {"format": version})))
    with pytest.raises(ValueError, match=f"has format {version}, and this version reads 2 to 4: load it with {what}"):
        loop(tmp_path / "it", 1)
