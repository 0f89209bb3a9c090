"""Averaged weights in checkpoints: every way to ask for them, names that are not there, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import DATA, Net, fit
from torch import nn

from callbacks import EMA, ModelCheckpoint
from engine import Callback, Resume
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.listing import facts, problems
from engine.cli.checkpoint import main


class Tied(Net):
    """Two names for one weight; the average is that of :class:`EMA`."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 1)
        self.second.weight = self.net.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) + self.second(batch)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.net.weight.sum())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.net.weight.sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.weight.detach().clone()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the averages, which the module has after its training."""
    module = Tied()
    result = fit(tmp_path_factory.mktemp("trained"), EMA(0.5), ModelCheckpoint(), max_epochs=1).run(module, DATA)
    assert isinstance(result.last_checkpoint, Path)
    return result.last_checkpoint, {name: value.clone() for name, value in module.state_dict().items()}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_every_way_to_ask_for_them(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, averages = trained
    plain = Tied.load_from_checkpoint(path)
    assert not equal(dict(plain.state_dict()), averages)
    module = Tied.load_from_checkpoint(path, weights="ema")
    assert equal(dict(module.state_dict()), averages)
    assert module.second.weight is module.net.weight

    expected = averages["net.weight"].sum().item()
    run = fit(tmp_path / "runs")
    assert run.validate(Tied(), DATA, checkpoint=path, weights="ema") == [{"weight": pytest.approx(expected)}]
    assert run.test(Tied(), DATA, checkpoint=path, weights="ema") == [{"weight": pytest.approx(expected)}]
    assert torch.equal(run.predict(Tied(), DATA, checkpoint=path, weights="ema")[0], averages["net.weight"])
    assert run.validate(Tied(), DATA, checkpoint=path) != [{"weight": pytest.approx(expected)}]

    class Look(Callback):
        def on_fit_start(self, run: Any, module: nn.Module) -> None:
            self.found = {name: value.clone() for name, value in module.state_dict().items()}

    look, how = Look(), Resume(path, weights_only=True, weights="ema")
    assert fit(tmp_path / "new", look, max_epochs=1).run(Tied(), DATA, resume=how).step == 4
    assert equal(look.found, averages)


def test_export(trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, averages = trained
    done = export_checkpoint(path, tmp_path / "out", weights="ema")
    assert done.tied == {"second.weight": "net.weight"}
    assert equal(load_file(done.files[0]), {name: averages[name] for name in averages if name != "second.weight"})
    assert main(["export", str(path), str(tmp_path / "half"), "--weights", "ema", "--dtype", "bf16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert torch.equal(half["net.weight"], averages["net.weight"].bfloat16())
    assert main(["export", str(path), str(tmp_path / "no"), "--weights", "emma"]) == 1
    assert "has no weights 'emma'; it has 'ema'; did you mean 'ema'?" in capsys.readouterr().err
    assert not (tmp_path / "no").exists() or not list((tmp_path / "no").iterdir())


def test_a_name_that_is_not_there(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = trained
    with pytest.raises(ValueError, match="has no weights 'swa'; it has 'ema'"):
        Tied.load_from_checkpoint(path, weights="swa")
    with pytest.raises(ValueError, match="has no weights 'swa'; it has 'ema'"):
        fit(tmp_path).validate(Tied(), DATA, checkpoint=path, weights="swa")
    with pytest.raises(ValueError, match="weights='ema' are those of a checkpoint: give it with checkpoint="):
        fit(tmp_path).test(Tied(), DATA, weights="ema")
    with pytest.raises(ValueError, match=r"Resume\(weights='ema'\) needs weights_only=True"):
        Resume(path, weights="ema")
    without = fit(tmp_path / "without", ModelCheckpoint(), max_epochs=1).run(Tied(), DATA).last_checkpoint
    assert without is not None
    assert not (Path(without) / "weights").exists()
    with pytest.raises(ValueError, match="has no weights 'ema'; it has the trained ones only"):
        Tied.load_from_checkpoint(without, weights="ema")


def test_they_are_listed_and_checked(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = trained
    found = facts(path, tensors=True)
    assert found["weights"] == ["ema"]
    assert set(found["tensors"]["weights"]) == {"ema/net.weight", "ema/net.bias", "ema/second.bias"}
    assert problems(path) == {str(path): []}


def test_damage_is_found(tmp_path: Path) -> None:
    done = fit(tmp_path, EMA(0.5), ModelCheckpoint(), max_epochs=1).run(Tied(), DATA)
    path = Path(str(done.last_checkpoint))
    file = next((path / "weights").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert any("weights/rank=00000.safetensors" in line for line in problems(path)[str(path)])
    Tied.load_from_checkpoint(path)  # does not read them
    with pytest.raises(DamagedCheckpoint, match="weights/rank=00000"):
        Tied.load_from_checkpoint(path, weights="ema")


class Own(Callback):
    """A callback of a user's own with other weights."""

    def __init__(self, name: str) -> None:
        self.name = name

    def other_weights(self, run: Any, module: nn.Module) -> dict[str, dict[str, Any]]:
        return {self.name: {"net.bias": torch.full((1,), 7.0)}}


def test_weights_of_ones_own_cover_a_part_of_the_model(tmp_path: Path) -> None:
    done = fit(tmp_path, Own("seven"), ModelCheckpoint(), max_epochs=1).run(Net(), DATA)
    path = Path(str(done.last_checkpoint))
    found, plain = Net.load_from_checkpoint(path, weights="seven"), Net.load_from_checkpoint(path)
    assert found.net.bias.item() == 7.0
    assert torch.equal(found.net.weight, plain.net.weight)
    assert json.loads((path / "weights" / "weights.json").read_text()) == {"seven": {"aliases": {}}}
    with pytest.raises(ValueError, match="Own has the weights 'a/b': a name is text without '/'"):
        fit(tmp_path / "b", Own("a/b"), ModelCheckpoint(), max_epochs=1).run(Net(), DATA)
    with pytest.raises(ValueError, match="Own has the weights 'ema': another callback has weights of this name"):
        fit(tmp_path / "c", EMA(), Own("ema"), ModelCheckpoint(), max_epochs=1).run(Net(), DATA)


def test_at_a_url(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/other"
    done = fit(tmp_path, EMA(0.5), ModelCheckpoint(dirpath=place), max_epochs=1).run(module := Tied(), DATA)
    assert equal(
        dict(Tied.load_from_checkpoint(str(done.last_checkpoint), weights="ema").state_dict()),
        dict(module.state_dict()),
    )
