"""Averaged weights in checkpoints: every way to ask for them, names that are not there, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import resummed
from support.toys import LINEAR_BATCHES, Linear, linear_fit
from torch import nn

from callbacks import EMA, SWA, ModelCheckpoint, Report, WeightAveraging
from engine import Callback, Resume
from engine.checkpoint.catalog import entries, facts, problems
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.files import DamagedCheckpoint
from engine.cli.main import main


class Tied(Linear):
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
    result = linear_fit(tmp_path_factory.mktemp("trained"), EMA(0.5), ModelCheckpoint(), max_epochs=1).run(
        module, LINEAR_BATCHES
    )
    assert isinstance(result.last_checkpoint, Path)
    return result.last_checkpoint, {name: value.clone() for name, value in module.state_dict().items()}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_every_way_to_ask_for_them(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, averages = trained
    plain = Tied.load_from_checkpoint(path, weights="trained")
    assert not equal(dict(plain.state_dict()), averages)
    module = Tied.load_from_checkpoint(path, weights="ema")
    assert equal(dict(module.state_dict()), averages)
    assert module.second.weight is module.net.weight

    expected = averages["net.weight"].sum().item()
    run = linear_fit(tmp_path / "runs")
    assert run.validate(Tied(), LINEAR_BATCHES, checkpoint=path, weights="ema") == [{"weight": pytest.approx(expected)}]
    assert run.test(Tied(), LINEAR_BATCHES, checkpoint=path, weights="ema") == [{"weight": pytest.approx(expected)}]
    assert torch.equal(run.predict(Tied(), LINEAR_BATCHES, checkpoint=path, weights="ema")[0], averages["net.weight"])
    other = plain.net.weight.sum().item()
    assert run.validate(Tied(), LINEAR_BATCHES, checkpoint=path, weights="trained") == [
        {"weight": pytest.approx(other)}
    ]

    class Look(Callback):
        def on_fit_start(self, run: Any, module: nn.Module) -> None:
            self.found = {name: value.clone() for name, value in module.state_dict().items()}

    look, how = Look(), Resume(path, weights_only=True, weights="ema")
    assert linear_fit(tmp_path / "new", look, max_epochs=1).run(Tied(), LINEAR_BATCHES, resume=how).step == 4
    assert equal(look.found, averages)


def test_export(trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, averages = trained
    done = export_checkpoint(path, tmp_path / "out", weights="ema")
    assert done.tied == {"second.weight": "net.weight"}
    assert equal(load_file(done.files[0]), {name: averages[name] for name in averages if name != "second.weight"})
    assert main(["checkpoint", "export", str(path), str(tmp_path / "half"), "--weights", "ema", "--dtype", "bf16"]) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert torch.equal(half["net.weight"], averages["net.weight"].bfloat16())
    assert main(["checkpoint", "export", str(path), str(tmp_path / "no"), "--weights", "emma"]) == 1
    assert "has no weights 'emma'; it has 'trained', 'ema'; did you mean 'ema'?" in capsys.readouterr().err
    assert not (tmp_path / "no").exists() or not list((tmp_path / "no").iterdir())


def test_a_name_that_is_not_there(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, _ = trained
    with pytest.raises(ValueError, match="has no weights 'swa'; it has 'trained', 'ema'"):
        Tied.load_from_checkpoint(path, weights="swa")
    with pytest.raises(ValueError, match="has no weights 'swa'; it has 'trained', 'ema'"):
        linear_fit(tmp_path).validate(Tied(), LINEAR_BATCHES, checkpoint=path, weights="swa")
    with pytest.raises(ValueError, match="weights='ema' are those of a checkpoint: give it with checkpoint="):
        linear_fit(tmp_path).test(Tied(), LINEAR_BATCHES, weights="ema")
    with pytest.raises(ValueError, match=r"Resume\(weights='ema'\) needs weights_only=True"):
        Resume(path, weights="ema")
    without = (
        linear_fit(tmp_path / "without", ModelCheckpoint(), max_epochs=1).run(Tied(), LINEAR_BATCHES).last_checkpoint
    )
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


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_damage_is_found(tmp_path: Path) -> None:
    done = linear_fit(tmp_path, EMA(0.5), ModelCheckpoint(), max_epochs=1).run(Tied(), LINEAR_BATCHES)
    path = Path(str(done.last_checkpoint))
    file = next((path / "weights").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert any("weights/rank=00000.safetensors" in line for line in problems(path)[str(path)])
    Tied.load_from_checkpoint(path, weights="trained")  # does not read them
    for wanted in (None, "ema"):
        with pytest.raises(DamagedCheckpoint, match="weights/rank=00000"):
            Tied.load_from_checkpoint(path, weights=wanted)


class Own(Callback):
    """A callback of a user's own with other weights."""

    def __init__(self, name: str) -> None:
        self.name = name

    def other_weights(self, run: Any, module: nn.Module) -> dict[str, dict[str, Any]]:
        return {self.name: {"net.bias": torch.full((1,), 7.0)}}


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_weights_of_ones_own_cover_a_part_of_the_model(tmp_path: Path) -> None:
    done = linear_fit(tmp_path, Own("seven"), ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)
    path = Path(str(done.last_checkpoint))
    found, plain = Linear.load_from_checkpoint(path, weights="seven"), Linear.load_from_checkpoint(path)
    assert found.net.bias.item() == 7.0 != plain.net.bias.item()  # validation did not have it
    assert torch.equal(found.net.weight, plain.net.weight)
    assert json.loads((path / "weights" / "weights.json").read_text()) == {"seven": {"aliases": {}}}
    with pytest.raises(ValueError, match="Own has the weights 'a/b': a name is text without '/'"):
        linear_fit(tmp_path / "b", Own("a/b"), ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)
    with pytest.raises(ValueError, match="Own has the weights 'trained': this is the name of the trained weights"):
        linear_fit(tmp_path / "d", Own("trained"), ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)
    with pytest.raises(ValueError, match="Own has the weights 'ema': another callback has weights of this name"):
        linear_fit(tmp_path / "c", EMA(), Own("ema"), ModelCheckpoint(), max_epochs=1).run(Linear(), LINEAR_BATCHES)


def test_at_a_url(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/other"
    done = linear_fit(tmp_path, EMA(0.5), ModelCheckpoint(dirpath=place), max_epochs=1).run(
        module := Tied(), LINEAR_BATCHES
    )
    assert equal(
        dict(Tied.load_from_checkpoint(str(done.last_checkpoint), weights="ema").state_dict()),
        dict(module.state_dict()),
    )


# -- which weights a checkpoint was scored with ---------------------------------------------------------------------------------------


class Scored(Tied):
    """``weight`` names the weights that validation has; ``score`` falls, so that the second of three epochs is the best."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", self.net.weight.sum().detach(), on_epoch=True, on_step=False)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("score", abs(self.current_epoch - 1.0))


def scored(
    root: Path, *callbacks: Callback, monitor: str = "score", loaders: Any = LINEAR_BATCHES, **settings: Any
) -> Any:
    keeps = ModelCheckpoint(every="1 epochs", monitor=monitor, save_top_k=-1)
    return linear_fit(root, *callbacks, keeps, num_sanity_val_steps=0, **settings).run(
        Scored(), LINEAR_BATCHES, loaders
    )


@pytest.mark.parametrize("average", [EMA(0.9), SWA(swa_epoch_start=1), WeightAveraging()], ids=lambda c: c.name)
def test_what_was_scored_is_what_is_tested(average: Any, tmp_path: Path) -> None:
    result, look = scored(tmp_path, average), []
    path, name = Path(str(result.best_checkpoint)), average.name
    assert (path.name, result.best_weights) == ("step=00000008", name)
    validated = json.loads((path / "manifest.json").read_text())["metrics"]["weight"]
    trained = Tied.load_from_checkpoint(path, weights="trained").net.weight.sum().item()
    assert trained != pytest.approx(validated)

    again = linear_fit(tmp_path)
    for what in ("best", path):
        for loop in (again.test, again.validate):
            assert loop(Tied(), LINEAR_BATCHES, checkpoint=what) == [{"weight": pytest.approx(validated)}]
            assert loop(Tied(), LINEAR_BATCHES, checkpoint=what, weights="trained") == [
                {"weight": pytest.approx(trained)}
            ]
        assert again.predict(Tied(), LINEAR_BATCHES, checkpoint=what)[0].sum().item() == pytest.approx(validated)
    last = json.loads((path.with_name("step=00000012") / "manifest.json").read_text())["metrics"]["weight"]
    assert again.test(Tied(), LINEAR_BATCHES, checkpoint="last") == [{"weight": pytest.approx(last)}]

    assert Tied.load_from_checkpoint(path).net.weight.sum().item() == pytest.approx(validated)
    for flags, expected in (((), validated), (("--weights", "trained"), trained)):
        out = tmp_path / f"out{len(flags)}"
        assert main(["checkpoint", "export", str(path), str(out), *flags]) == 0
        assert load_file(out / "model.safetensors")["net.weight"].sum().item() == pytest.approx(expected)
        assert main(["checkpoint", "pack", str(path), f"{out}.ckpt", "--pickle", *flags]) == 0
        packed = torch.serialization.load(f"{out}.ckpt", weights_only=True)["state_dict"]  # torch.load fails here
        assert packed["net.weight"].sum().item() == pytest.approx(expected)
    assert main(["checkpoint", "pack", str(path), str(tmp_path / "one.ckpt")]) == 0
    assert again.test(Tied(), LINEAR_BATCHES, checkpoint=tmp_path / "one.ckpt") == [
        {"weight": pytest.approx(validated)}
    ]

    class Look(Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            look.append(module.net.weight.sum().item())

    for how in (
        Resume(path, weights_only=True),
        Resume(path, weights_only=True, weights="trained"),
        path,
    ):
        linear_fit(tmp_path / "new", Look(), max_epochs=3).run(Tied(), LINEAR_BATCHES, resume=how)
    assert look == [pytest.approx(validated), pytest.approx(trained), pytest.approx(trained)]


def test_a_metric_of_the_training_is_that_of_the_trained_weights(tmp_path: Path) -> None:
    """Also where validation has the averages, and in a run without validation."""
    for root, loaders in ((tmp_path / "a", LINEAR_BATCHES), (tmp_path / "b", None)):
        result = scored(root, EMA(0.9), monitor="loss", loaders=loaders, max_epochs=1)
        assert result.best_weights == "trained"
        plain = Tied.load_from_checkpoint(result.best_checkpoint, weights="trained")
        assert equal(dict(Tied.load_from_checkpoint(result.best_checkpoint).state_dict()), dict(plain.state_dict()))


def test_before_there_is_an_average_the_trained_weights_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = scored(tmp_path, EMA(0.9, update_starting_at_epoch=2), Report())
    assert (result.best_weights, "weights" in str(result)) == ("trained", False)
    assert [entry["scored_with"] for entry in entries(tmp_path)] == ["trained", "trained", "ema"]
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head.index("weights") == 6
    assert [next(word for word in row if word in ("trained", "ema")) for row in rows] == ["trained", "trained", "ema"]
    page = (tmp_path / "report.html").read_text()
    assert "<td>ema</td>" in page
    result = scored(tmp_path / "always", EMA(0.9))
    assert f"best checkpoint: {result.best_checkpoint} (weights 'ema')" in str(result)
    assert facts(result.best_checkpoint)["scored_with"] == "ema"


def changed(path: Path, **entries_: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = {name: value for name, value in (manifest | entries_).items() if value is not None}
    (path / "manifest.json").write_text(json.dumps(resummed(manifest)))


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_a_checkpoint_that_does_not_say_gives_the_trained_weights_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(str(scored(tmp_path, EMA(0.9)).best_checkpoint))
    changed(path, scored_with=None)
    trained = Tied.load_from_checkpoint(path, weights="trained").state_dict()
    assert "loads the others" not in caplog.text
    assert equal(dict(Tied.load_from_checkpoint(path).state_dict()), dict(trained))
    assert "weights='ema' loads the others" in caplog.text
    assert main(["checkpoint", "list", str(path.parent)]) == 0
    assert "not noted" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["swa", 3, [], {"a": 1}, "../ema", "\x1b[2J"])
def test_a_hostile_name_is_damage(tmp_path: Path, value: Any) -> None:
    path = Path(str(scored(tmp_path, EMA(0.9), max_epochs=1).best_checkpoint))
    changed(path, scored_with=value)
    for weights in (None, "ema", "trained"):
        with pytest.raises(DamagedCheckpoint, match="scored_with names the weights") as raised:
            Tied.load_from_checkpoint(path, weights=weights)
        assert str(raised.value).isprintable()
    entries(path.parent)
