"""Numbered checkpoints with hooks around them, of an engine in a loop of one's own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from engine import Engine
from engine.compat.accelerate.checkpoints import Checkpoints
from engine.compat.accelerate.padded_loaders import padded
from engine.distributed.collectives import broadcast_object


def naming(folder: Path | None = None, **settings: Any) -> SimpleNamespace:
    usual = {
        "project_dir": folder,
        "automatic_checkpoint_naming": folder is not None,
        "total_limit": None,
        "iteration": 0,
    }
    return SimpleNamespace(**{**usual, **settings})


def one(names: Any) -> tuple[Checkpoints, Any]:
    engine = Engine(accelerator="cpu")
    model: Any = engine.prepare(nn.Linear(1, 1, bias=False))
    return Checkpoints(engine, names), model


def fill(model: Any, value: float) -> None:
    model.weight.data.fill_(value)


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_numbers_go_up_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints, model = one(naming(tmp_path, total_limit=2, iteration=8))
    for number in range(8, 12):
        fill(model, number)
        assert Path(checkpoints.save(None)).name == f"checkpoint_{number}"
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_10", "checkpoint_11"]  # by number, not by name
    fill(model, 0.0)
    checkpoints.load(None, strict=True, within_epochs=True)
    assert model.weight.item() == 11.0
    checkpoints.naming.iteration = 10
    with pytest.raises(ValueError, match="checkpoint_10 exists: set the project's iteration"):
        checkpoints.save(None)
    assert names_in(tmp_path / "checkpoints") == ["checkpoint_10", "checkpoint_11"]


def test_a_folder_of_ones_own_counts_too(tmp_path: Path) -> None:
    checkpoints, model = one(naming())
    fill(model, 3.0)
    assert checkpoints.save(tmp_path / "mine") == tmp_path / "mine"
    assert checkpoints.naming.iteration == 1
    fill(model, 0.0)
    checkpoints.load(tmp_path / "mine", strict=True, within_epochs=True)
    assert model.weight.item() == 3.0
    with pytest.raises(ValueError, match="needs automatic_checkpoint_naming"):
        checkpoints.load(None, strict=True, within_epochs=True)
    with pytest.raises(ValueError, match="needs a folder: give project_dir"):
        one(naming(automatic_checkpoint_naming=True))[0].save(None)


def test_hooks_are_called_in_order_until_they_are_removed(tmp_path: Path) -> None:
    checkpoints, model = one(naming())
    called: list[Any] = []

    def save(name: str) -> Any:
        def hook(models: list[Any], weights: list[Any], folder: str) -> None:
            called.append((name, models == [model], [each["weight"].item() for each in weights]))
            (Path(folder) / f"{name}.txt").write_text(name)

        return hook

    fill(model, 2.0)
    checkpoints.hook(checkpoints.before_save, save("a"))
    handle = checkpoints.hook(checkpoints.before_save, save("b"))
    checkpoints.save(tmp_path / "one")
    handle.remove()
    checkpoints.save(tmp_path / "two")
    assert called == [("a", True, [2.0]), ("b", True, [2.0]), ("a", True, [2.0])]
    assert [each in names_in(tmp_path / "one") for each in ("a.txt", "b.txt")] == [True, True]
    assert [each in names_in(tmp_path / "two") for each in ("a.txt", "b.txt")] == [True, False]
    assert names_in(tmp_path) == ["one", "two"]  # nothing stays beside them


def test_a_hook_takes_a_model_out(tmp_path: Path) -> None:
    checkpoints, model = one(naming())
    other: Any = checkpoints.engine.prepare(nn.Linear(1, 1, bias=False))
    fill(model, 2.0)
    fill(other, 3.0)
    saving = checkpoints.hook(checkpoints.before_save, lambda models, weights, folder: weights.pop(0))
    checkpoints.save(tmp_path / "one")
    saving.remove()
    fill(model, 0.0)
    fill(other, 0.0)
    with pytest.raises(ValueError, match="missing in the checkpoint"):
        checkpoints.load(tmp_path / "one", strict=True, within_epochs=True)
    checkpoints.hook(checkpoints.before_load, lambda models, folder: models.remove(model))
    checkpoints.load(tmp_path / "one", strict=True, within_epochs=True)
    assert (model.weight.item(), other.weight.item()) == (0.0, 3.0)


def test_positions_of_padded_loaders(tmp_path: Path) -> None:
    def made() -> tuple[Checkpoints, Any]:
        checkpoints, _ = one(naming())
        data = TensorDataset(torch.arange(6))
        loader = padded(DataLoader(data, batch_size=2), checkpoints.engine.group, [], processes=(1, 0))
        return checkpoints, checkpoints.following(loader)

    checkpoints, loader = made()
    next(batches := iter(loader))
    checkpoints.save(tmp_path / "one")
    batches.close()
    for within, expected in ((True, [[2, 3], [4, 5]]), (False, [[0, 1], [2, 3], [4, 5]])):
        checkpoints, loader = made()
        checkpoints.load(tmp_path / "one", strict=True, within_epochs=within)
        assert [batch[0].tolist() for batch in loader] == expected
    checkpoints.forget()
    assert checkpoints.state_dict() == {"loaders": []}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_a_block_without_filling_up() -> None:
    checkpoints, _ = one(naming())
    group = checkpoints.engine.group
    loader = checkpoints.following(padded(DataLoader(range(5), batch_size=2), group, [], processes=(2, 0)))  # type: ignore[arg-type]
    whole, short = [[0, 1], [4, 0]], [[0, 1], [4]]
    with checkpoints.evened(False):
        assert [batch.tolist() for batch in loader] == short
    with pytest.raises(KeyError), checkpoints.evened(False):
        raise KeyError
    assert [batch.tolist() for batch in loader] == whole
    checkpoints.following(padded(DataLoader(Stream(), batch_size=2), group, [], processes=(2, 0)))
    with pytest.warns(UserWarning, match="streams are filled up"), checkpoints.evened(False):
        assert [batch.tolist() for batch in loader] == short


# -- on two ranks ---------------------------------------------------------------------------------------------------------------


def rank_hooks() -> Any:
    """The main process alone takes the model out of its list and writes; the number of the next folder is its too."""
    engine = Engine(accelerator="cpu")
    parent = broadcast_object(engine.group, tempfile.mkdtemp() if engine.is_main_process else None)
    model: Any = engine.prepare(nn.Linear(1, 1, bias=False))
    checkpoints = Checkpoints(engine, naming(Path(parent)))

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if engine.is_main_process:
            torch.save(weights.pop()["weight"], f"{folder}/mine.pt")

    def load(models: list[Any], folder: str) -> None:
        engine.unwrap_model(models.pop()).weight.data.copy_(torch.load(f"{folder}/mine.pt"))

    fill(engine.unwrap_model(model), 5.0)
    checkpoints.hook(checkpoints.before_save, save)
    path = checkpoints.save(None)
    listed = names_in(Path(parent) / "checkpoints")
    fill(engine.unwrap_model(model), 0.0)
    checkpoints.hook(checkpoints.before_load, load)
    checkpoints.load(None, strict=True, within_epochs=True)
    engine.wait_for_everyone()
    if engine.is_main_process:
        shutil.rmtree(parent)
    return {"name": Path(path).name, "listed": listed, "weight": engine.unwrap_model(model).weight.item()}


def test_hooks_on_two_ranks() -> None:
    expected = {"name": "checkpoint_0", "listed": ["checkpoint_0"], "weight": 5.0}
    assert ranks_of_file(__file__, 2)["hooks"] == [expected, expected]
