"""``TrainModule.load_from_checkpoint``: the constructor's arguments, the weights, and where they come from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Tied, save_on_two_ranks, tied_batches, train_and_save
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn

from callbacks import ModelCheckpoint
from engine import TrainModule
from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.storage_paths import storage_of
from engine.config.hyperparameters import constructor_arguments


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_hyperparameters_and_weights_come_back_and_overrides_win(tmp_path: Path) -> None:
    module = Tied(3, scale=2.0)
    path = train_and_save(tmp_path, module)
    for where in (path, str(path), path.parent, tmp_path):  # a folder's newest
        found = Tied.load_from_checkpoint(where)
        assert type(found) is Tied
        assert found.hparams == {"width": 3, "scale": 2.0, "rate": 0.1}
        assert same(found, module)
        assert found.model["up"].weight is found.model["embed"].weight
    other = Tied.load_from_checkpoint(path, scale=5.0)
    assert (other.scale, other.hparams.scale, other.hparams.width) == (5.0, 5.0, 3)
    assert same(other, module)


def test_what_the_constructor_does_not_take_is_left_out(tmp_path: Path) -> None:
    path = train_and_save(tmp_path, Tied(3))

    class Smaller(Tied):
        def __init__(self, width: int, /) -> None:  # by its place only
            super().__init__(width)

    assert Smaller.load_from_checkpoint(path).hparams.width == 3
    with pytest.raises(
        TypeError, match=r"Smaller.__init__ has no argument 'widht'; did you mean 'width'\?; it has width"
    ):
        Smaller.load_from_checkpoint(path, widht=3)


class Needs(Tied):
    def __init__(self, width: int, net: Any, rate: float = 0.1) -> None:
        super().__init__(width, rate=rate)


def test_a_missing_argument_is_named(tmp_path: Path) -> None:
    path = train_and_save(tmp_path, Tied(3))
    expected = r"Needs.__init__ needs 'net', not among the checkpoint's hyperparameters \(width, scale, rate\): give it as an override, load_from"
    with pytest.raises(TypeError, match=expected):
        Needs.load_from_checkpoint(path)
    assert Needs.load_from_checkpoint(path, net="x").hparams.net == "x"


def distance(a: Tensor, b: Tensor) -> Tensor:
    return a - b


class Acts(Tied):
    def __init__(self, width: int, act: Any = nn.functional.relu, loss: Any = distance, mode: str = "a") -> None:
        super().__init__(width)
        self.save_hyperparameters()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...


def test_what_a_checkpoint_cannot_hold_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = train_and_save(tmp_path, Acts(3, act=nn.functional.gelu))
    logger = logging.getLogger("engine")
    logger.addHandler(caplog.handler)
    Acts.load_from_checkpoint(path, act=nn.functional.gelu)
    assert "engine" not in {each.name for each in caplog.records}
    Acts.load_from_checkpoint(path)
    logger.removeHandler(caplog.handler)
    assert (
        "the module was made with act=<built-in function gelu>, which a checkpoint cannot hold: pass them as arguments"
        in caplog.text
    )
    with pytest.raises(ValueError, match=r"\[4, 6\] here.*; it was created with width=3$"):
        fit(tmp_path).validate(Acts(4), tied_batches(1), checkpoint=path)


def test_double_precision_says_how_it_is_loaded(tmp_path: Path) -> None:
    module = Tied(3)
    path = train_and_save(tmp_path, module, precision="64-true")
    how = r"strict=False rounds its values .*load_from_checkpoint\(path, strict=False\); to keep them, .*torch.set_default_dtype\(torch.float64\)"
    with pytest.raises(
        ValueError, match=rf"of another type: .*It was saved in double precision \(precision='64-true'\): {how}"
    ):
        Tied.load_from_checkpoint(path)
    rounded = Tied.load_from_checkpoint(path, strict=False)
    assert torch.equal(rounded.model["head"].weight, module.model["head"].weight.float())
    torch.set_default_dtype(torch.float64)
    try:
        assert same(Tied.load_from_checkpoint(path), module)
    finally:
        torch.set_default_dtype(torch.float32)


class Configured(TrainModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.net = nn.Linear(6, config["width"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def test_one_dict_for_all_arguments(tmp_path: Path) -> None:
    module = Configured({"width": 2, "lr": 0.1})
    assert module.hparams_name == "config"
    path = train_and_save(tmp_path, module)
    assert same(Configured.load_from_checkpoint(path), module)
    found = Configured.load_from_checkpoint(path, config={"width": 2, "lr": 0.5})
    assert found.hparams == {"width": 2, "lr": 0.5}
    assert Configured.load_from_checkpoint(path, lr=0.7).hparams == {"width": 2, "lr": 0.7}
    with pytest.raises(TypeError, match=r"has no argument 'rate'; it has config"):
        Configured.load_from_checkpoint(path, rate=0.7)
    # By the name that was saved, even where the constructor has an argument of the same name as an entry.
    assert constructor_arguments(_Named, {"width": 2}, {}, "config") == ([], {"config": {"width": 2}})


class _Named:
    def __init__(self, config: Any, width: int = 0) -> None: ...


class _Any:
    def __init__(self, a: int, *, b: int = 0, **rest: int) -> None: ...


def test_arguments_for_constructors() -> None:
    assert constructor_arguments(_Any, {"a": 1, "c": 2}, {"d": 3}) == ([], {"a": 1, "c": 2, "d": 3})
    assert constructor_arguments(_Any, {"c": 2}, {"a": 3}) == ([], {"a": 3, "c": 2})
    with pytest.raises(
        TypeError, match=r"_Any.__init__ needs 'a', not among the checkpoint's hyperparameters \(none\)"
    ):
        constructor_arguments(_Any, {}, {})


class Late(TrainModule):
    """Its parameters are created again at each call of ``configure_model``."""

    calls = 0

    def configure_model(self) -> None:
        self.calls += 1
        self.net = nn.Linear(6, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parts_of_configure_model_are_built_once_and_keep_their_weights(tmp_path: Path) -> None:
    module = Late()
    path = train_and_save(tmp_path, module)
    found = Late.load_from_checkpoint(path)
    assert same(found, module)
    loss = fit(tmp_path).validate(found, tied_batches(1))[0]["val"]
    assert loss == pytest.approx(module.training_step(tied_batches(1)[0], 0).item())
    assert found.calls == 1


def test_what_does_not_fit_is_an_error_or_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = train_and_save(tmp_path, Tied(3))
    with pytest.raises(ValueError, match=r"does not fit Tied: of another shape: model.embed.weight"):
        Tied.load_from_checkpoint(path, width=4)

    class More(Tied):
        def __init__(self, width: int = 4) -> None:
            super().__init__(width)
            self.more = nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"missing in the checkpoint: more.bias, more.weight"):
        More.load_from_checkpoint(path)
    logger = logging.getLogger("engine")
    logger.addHandler(caplog.handler)
    found = More.load_from_checkpoint(path, strict=False)
    logger.removeHandler(caplog.handler)
    assert "more.bias, more.weight" in caplog.text
    assert torch.equal(found.model["head"].weight, Tied.load_from_checkpoint(path).model["head"].weight)


def test_the_device_is_chosen(tmp_path: Path) -> None:
    path = train_and_save(tmp_path, Tied(3))
    assert Tied.load_from_checkpoint(path, map_location="cpu").device == torch.device("cpu")
    assert Tied.load_from_checkpoint(path, map_location=torch.device("meta")).model["head"].weight.is_meta


def test_what_the_module_has_saved_is_given_back(tmp_path: Path) -> None:
    class Counts(Tied):
        extra = 0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = self.extra

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = checkpoint["extra"]

    module = Counts()
    module.extra = 7
    assert Counts.load_from_checkpoint(train_and_save(tmp_path, module)).extra == 7


def test_from_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    module = Tied(3)
    path = train_and_save(tmp_path, module)
    fsspec.filesystem("memory").put(str(path), "/runs/step=00000002", recursive=True)
    assert same(Tied.load_from_checkpoint("memory://runs/step=00000002"), module)
    assert same(Tied.load_from_checkpoint("memory://runs"), module)
    assert same(Tied.load_from_checkpoint(f"file://{path}"), module)
    fsspec.filesystem("memory").rm("/runs", recursive=True)
    with pytest.raises(FileNotFoundError, match=r"memory://runs/step=00000002 is not a checkpoint"):
        Tied.load_from_checkpoint("memory://runs/step=00000002")


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_nothing_there_and_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint, and contains none .*beside it: none"):
        Tied.load_from_checkpoint(tmp_path / "nothing")
    path = train_and_save(tmp_path, Tied(3))
    with pytest.raises(FileNotFoundError, match=r"complete ones beside it: step=00000002"):
        Tied.load_from_checkpoint(path.with_name("step=3"))
    file = next((path / "model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"rank=00000.safetensors has \d+ bytes, and had \d+"):
        Tied.load_from_checkpoint(path)
    with pytest.raises(DamagedCheckpoint, match=r"rank=00000.safetensors has .*there is no complete checkpoint"):
        Tied.load_from_checkpoint(path.parent)


def test_it_is_not_removed_while_it_is_read(tmp_path: Path) -> None:
    path = train_and_save(tmp_path, Tied(3))
    train_and_save(tmp_path, Tied(3), max_epochs=2, name="other").rename(path.with_name("other"))
    removed: list[bool] = []

    class Slow(Tied):
        def configure_model(self) -> None:
            removed.append(storage_of(tmp_path / "checkpoints").remove("step=00000002"))

    assert path.name == "step=00000002"
    Slow.load_from_checkpoint(path)
    assert removed == [False]
    assert storage_of(path.parent).remove(path.name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_ranks(tmp_path: Path, strategy: str) -> None:
    ranks_of(save_on_two_ranks, 2, tmp_path, strategy)
    torch.manual_seed(0)
    module = Tied(scale=2.0)
    # One process with the batches of both ranks side by side does the same, but for batch norm's statistics.
    found = Tied.load_from_checkpoint(tmp_path)
    assert found.hparams.scale == 2.0
    assert not torch.equal(found.model["head"].weight, module.model["head"].weight)
    step = (found.model["head"].weight - module.model["head"].weight * (1 - 0.1 * 0.01)).abs()
    assert torch.allclose(step, torch.full_like(step, 0.1), atol=1e-3)  # AdamW's first step is the learning rate
    assert storage_of(tmp_path / "checkpoints").manifests().popitem()[1]["world_size"] == 2


def test_the_best_and_the_last_of_a_run(tmp_path: Path) -> None:
    """``RUN/best`` and ``RUN/last``, where nothing has the name; without a folder, and without scores, an error that says what to give."""
    module = Weight()
    callbacks = ModelCheckpoint(monitor="val", mode="max", every="1 steps", save_top_k=-1)
    result = fit(tmp_path / "run", max_epochs=1, val_every="1 steps", callbacks=callbacks).run(module, ones(3), ones(1))
    assert result.best_checkpoint == tmp_path / "run" / "checkpoints" / "step=00000001"  # w falls by 1 a step
    for place in ("run", "run/checkpoints"):
        assert Weight.load_from_checkpoint(tmp_path / place / "best").w.item() == -1.0
        assert Weight.load_from_checkpoint(f"{tmp_path}/{place}/last/").w.item() == -3.0
    with pytest.raises(FileNotFoundError, match=r"give the run's folder as well, as in 'runs/best'"):
        Weight.load_from_checkpoint("best")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        Weight.load_from_checkpoint(tmp_path / "nowhere" / "best")
    for argument, other in (("resume", fit(tmp_path / "o").run), ("checkpoint", fit(tmp_path / "o").test)):
        with pytest.raises(
            FileNotFoundError, match=rf"the best one of .*/run is Fit\(root_dir='.*/run'\) with {argument}='best'"
        ):
            other(Weight(), ones(1), **{argument: f"{tmp_path}/run/best"})
    fit(tmp_path / "unscored", max_epochs=1, callbacks=ModelCheckpoint()).run(Weight(), ones(3))
    with pytest.raises(ValueError, match=r"no checkpoint in .*unscored has a score: train with ModelCheckpoint"):
        Weight.load_from_checkpoint(tmp_path / "unscored" / "best")
