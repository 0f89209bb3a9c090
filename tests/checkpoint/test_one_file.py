"""A checkpoint as one file: written by a run or packed, and read wherever a checkpoint's path is taken."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from models import fit
from trained import Tied

from engine import Callback, DamagedCheckpoint, Engine, TrainModule
from engine.checkpoint.one_file import is_one_file, unpack


class Keeps(Callback):
    def __init__(self, where: Path, step: int) -> None:
        self.where, self.step = where, step

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step == self.step:
            assert run.save_checkpoint_at(self.where, one_file=True) == self.where


def data() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 6) for _ in range(4)]


def trained(root: Path, callbacks: list[Callback], **options: Any) -> TrainModule:
    torch.manual_seed(0)
    module = Tied()
    fit(root, max_epochs=2, callbacks=callbacks).run(module, data(), **options)
    return module


def test_a_run_goes_on_from_one_file_as_if_it_had_not_ended(tmp_path: Path) -> None:
    file = tmp_path / "moved" / "x.ckpt"
    whole = trained(tmp_path / "one", [Keeps(file, 5)])
    assert [path.name for path in file.parent.iterdir()] == ["x.ckpt"]
    again = trained(tmp_path / "two", [], resume=file)
    torch.testing.assert_close(dict(again.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    loaded = Tied.load_from_checkpoint(file)
    engine = Engine(accelerator="cpu")
    prepared = engine.prepare_model(Tied())
    engine.prepare_data_loader(data())
    engine.prepare_optimizer(torch.optim.AdamW(prepared.parameters(), lr=0.1))
    assert engine.load_state(file)["counters"]["step"] == 5
    torch.testing.assert_close(dict(loaded.state_dict()), dict(prepared.state_dict()), rtol=0, atol=0)


def test_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only at a local path"):
        trained(tmp_path, [Keeps("memory://x.ckpt", 1)])  # type: ignore[arg-type]


def test_what_leads_out_of_the_folder_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("manifest.json", "{}")
        archive.writestr("../outside.json", "{}")
    assert is_one_file(tmp_path / "x.ckpt")
    with pytest.raises(DamagedCheckpoint, match="outside"):
        unpack(tmp_path / "x.ckpt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.ckpt"]
