"""Checkpoints of an ``Accelerator``: names, limits, hooks, positions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from engine.interop.accelerate import Accelerator, skip_first_batches
from engine.interop.accelerate.big_modeling import init_empty_weights
from engine.interop.accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    load_checkpoint_in_model,
    save,
)


def prepared(rules: str = "exact", **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, rules=rules, **options)
    model: Any = torch.nn.Linear(1, 1)
    loader: Any = DataLoader(torch.arange(10.0).reshape(10, 1), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
    return accelerator, model, optimizer, loader


def step(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_trackers_write_into_the_folder_of_the_project() -> None:
    assert ProjectConfiguration(project_dir="runs").logging_dir == "runs"
    assert ProjectConfiguration(project_dir="runs", logging_dir="logs").logging_dir == "logs"


def test_names_and_limit(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer, loader = prepared(project_config=project)
    weights = []
    for batch in loader:
        step(accelerator, model, optimizer, batch)
        accelerator.save_state()
        weights.append(model.weight.item())
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_3", "checkpoint_4"]
    assert accelerator.save_iteration == 5
    with torch.no_grad():
        model.weight.fill_(0.0)
    accelerator.load_state()
    assert model.weight.item() == weights[-1]
    project.iteration = 4
    with pytest.raises(ValueError, match="checkpoint_4 exists"):
        accelerator.save_state()


def test_hooks_save_and_load_models_themselves(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = prepared()
    other: Any = accelerator.prepare(torch.nn.Linear(1, 2))
    step(accelerator, model, optimizer, torch.ones(2, 1))

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        assert models == [model, other]
        save_file(weights.pop(0), f"{folder}/mine.safetensors")

    def load(models: list[Any], folder: str) -> None:
        models.pop(0).load_state_dict(load_file(f"{folder}/mine.safetensors"))

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(tmp_path / "one")
    assert (tmp_path / "one" / "mine.safetensors").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["one"]
    expected = [p.clone() for p in (*model.parameters(), *other.parameters())]
    for each in (*model.parameters(), *other.parameters()):
        each.data.fill_(0.0)
    with pytest.raises(ValueError, match=r"missing in the checkpoint: 0\."):
        accelerator.load_state(tmp_path / "one")
    accelerator.register_load_state_pre_hook(load)
    accelerator.load_state(tmp_path / "one")
    for found, wanted in zip((*model.parameters(), *other.parameters()), expected, strict=True):
        assert torch.equal(found, wanted)
    handle.remove()
    accelerator.save_state(tmp_path / "two")
    assert not (tmp_path / "two" / "mine.safetensors").exists()


def test_without_a_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
    next(iter(loader))
    accelerator.save_state(tmp_path)  # an empty folder that exists
    accelerator.load_state(tmp_path)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
@pytest.mark.parametrize("stateful", [False, True])
def test_an_epoch_continues_as_accelerates_scripts_do_it(tmp_path: Path, rules: str, stateful: bool) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator, _, _, loader = prepared(rules, dataloader_config=config)
    next(iter(loader))
    list(loader)  # a whole epoch
    rest = []
    for index, batch in enumerate(loader):
        if index == 2:
            accelerator.save_state(tmp_path / "state")
        if index > 2:
            rest.append(batch)
    following = list(loader)
    accelerator, _, _, loader = prepared(rules, dataloader_config=config)
    accelerator.load_state(tmp_path / "state")
    continued = loader if stateful else accelerator.skip_first_batches(loader, 3)
    found, ends = [], []
    for batch in continued:
        found.append(batch)
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert torch.equal(torch.cat(found), torch.cat(rest))
    assert ends == [False, True]
    assert torch.equal(torch.cat(list(loader)), torch.cat(following))


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
@pytest.mark.parametrize("seedable", [False, True])
def test_an_epoch_continues_twice(tmp_path: Path, rules: str, seedable: bool) -> None:
    def started() -> tuple[Accelerator, Any]:
        accelerator, _, _, loader = prepared(
            rules, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
        )
        return accelerator, loader

    accelerator, loader = started()
    whole = []
    for _ in range(2):
        for batch in loader:
            whole.append(batch)
            if len(whole) == 1:
                accelerator.save_state(tmp_path / "1")
    for skipped in (1, 2):
        accelerator, loader = started()
        accelerator.load_state(tmp_path / str(skipped))
        found = []
        for batch in accelerator.skip_first_batches(loader, skipped):
            found.append(batch)
            if len(found) == 1 and skipped == 1:
                accelerator.save_state(tmp_path / "2")
        found += list(loader)
        assert torch.equal(torch.cat(found), torch.cat(whole[skipped:]))


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
@pytest.mark.parametrize("stateful", [False, True])
def test_an_epoch_that_was_saved_at_its_last_batch_is_over(tmp_path: Path, rules: str, stateful: bool) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator, _, _, loader = prepared(rules, dataloader_config=config)
    for epoch in range(2):
        for index, _ in enumerate(loader):
            if (epoch, index) == (1, 4):
                accelerator.save_state(tmp_path / "state")
    following = list(loader)
    accelerator, _, _, loader = prepared(rules, dataloader_config=config)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(torch.cat(list(loader)), torch.cat(following))


def test_a_plain_loader_is_skipped_too() -> None:
    loader: Any = DataLoader(range(6), batch_size=2)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == [[4, 5]]


def test_what_cannot_be_asked_for() -> None:
    accelerator, *_ = prepared()
    with pytest.raises(ValueError, match="needs automatic_checkpoint_naming"):
        accelerator.load_state()


def test_a_checkpoint_that_was_to_be_a_pickle_is_saved_all_the_same(tmp_path: Path) -> None:
    accelerator, model, optimizer, _ = prepared()
    with pytest.warns(UserWarning, match="safetensors and JSON all the same"):
        accelerator.save_state(tmp_path / "one", safe_serialization=False)
    before = model.weight.clone()
    step(accelerator, model, optimizer, torch.ones(2, 1))
    accelerator.load_state(tmp_path / "one")
    assert torch.equal(model.weight, before)


class Tied(torch.nn.Module):
    """Weights of 36 and 400 bytes; the first is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.large = torch.nn.Linear(10, 10, bias=False)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 100])
def test_weights_are_loaded_into_a_model(tmp_path: Path, safe: bool, size: int | str) -> None:
    accelerator, saved, loaded = Accelerator(cpu=True), Tied(), Tied()
    files = accelerator.save_model(saved, tmp_path, max_shard_size=size, safe_serialization=safe)
    assert len(files) == (1 if size == "10GB" else 2)
    load_checkpoint_in_model(loaded, tmp_path, strict=True)
    with init_empty_weights():
        deferred = Tied()
    load_checkpoint_in_model(deferred, tmp_path, device_map={"": "cpu"}, dtype=torch.float64)
    assert deferred.first.weight is deferred.second.weight
    assert deferred.large.weight.dtype == torch.float64
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
        assert torch.equal(deferred.state_dict()[name].float(), weight)
    if not safe:
        theirs = Tied()
        accelerate.load_checkpoint_in_model(theirs, str(tmp_path))
        assert torch.equal(theirs.large.weight, saved.large.weight)


def test_weights_for_several_devices_and_weights_that_are_not_there(tmp_path: Path) -> None:
    for given in ({"device_map": "auto"}, {"device_map": {"first": 0, "large": "cpu"}}, {"device_map": {"": "disk"}}):
        with pytest.raises(NotImplementedError, match=r"device_map={'': device} at most"):
            load_checkpoint_in_model(Tied(), tmp_path, **given)
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load_checkpoint_in_model(Tied(), tmp_path)
    torch.save({"first.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint_in_model(Tied(), tmp_path)


@pytest.mark.parametrize("accelerator", [None, Accelerator(cpu=True)], ids=["save", "Accelerator.save"])
def test_tied_weights_are_saved_once(tmp_path: Path, accelerator: Accelerator | None) -> None:
    state = Tied().state_dict()
    (save if accelerator is None else accelerator.save)(state, tmp_path / "x", safe_serialization=True)
    found = load_file(tmp_path / "x")
    assert list(found) == ["first.weight", "large.weight"]
    assert torch.equal(found["first.weight"], state["second.weight"])
