"""One form of checkpoints: a run continues from a user's own loop, and a loop from a run, to the bit; earlier forms are read."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import read, record_of, resummed
from support.toys import fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA
from engine import Callback, Engine, Resume, TrainModule
from engine.checkpoint.staging import Staging

DATA = TensorDataset(torch.arange(22.0).reshape(22, 1) / 10)
STEPS = 6
"""Of an epoch: eleven batches of two, in windows of two."""


class Net(TrainModule):
    """Dropout, momentum in Adam's way, and a rate that falls with every step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class SavesAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.step == self.step:
            run.save_checkpoint("here")

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def loader() -> Any:
    return DataLoader(DATA, batch_size=2, shuffle=True)


def run(root: Path, module: Net, steps: int, *callbacks: Any, resume: Any = None) -> Any:
    settings: dict[str, Any] = {"max_steps": steps, "accumulate_grad_batches": 2, "callbacks": callbacks, "seed": 5}
    return fit(root, **settings).run(module, loader(), resume=resume)


class Loop:
    """The same training in a user's own loop."""

    def __init__(self, module: Net, *more: Any) -> None:
        torch.manual_seed(5)
        ((optimizer,), (schedule,)) = module.configure_optimizers()
        self.engine, self.done = Engine(accelerator="cpu", accumulate_grad_batches=2, seed=5), 0
        self.model, self.optimizer, self.loader, self.scheduler, *_ = self.engine.prepare(
            module, optimizer, loader(), schedule["scheduler"], *more
        )

    def run(self, steps: int) -> None:
        while self.done < steps:
            for batch in self.loader:
                with self.engine.accumulate(self.model):
                    self.engine.backward(self.model.training_step(batch, 0))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.done += self.engine.sync_gradients
                if self.done == steps:
                    break


def weights(module: Net) -> list[list[float]]:
    return [p.flatten().tolist() for p in module.parameters()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """After ten steps without a break, by the run; the loop gives the same."""
    module, other = Net(), Net()
    run(tmp_path_factory.mktemp("whole"), module, 10)
    Loop(other).run(10)
    assert weights(module) == weights(other)
    return weights(module)


@pytest.mark.parametrize("step", [2, STEPS, 8])
def test_a_loop_goes_on_from_a_run(tmp_path: Path, step: int, expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Net(), step, SavesAt(step))
    module = Net(seed=9)
    loop = Loop(module, DataLoader(DATA))  # one for validation as well
    with caplog.at_level(logging.WARNING, "engine"):
        manifest = loop.engine.load_state(tmp_path / "checkpoints" / "here")
    assert "your own loop does not use its callbacks" in caplog.text
    assert manifest["counters"]["step"] == step
    loop.done = step
    loop.run(10)
    assert weights(module) == expected


@pytest.mark.parametrize("facts", [{}, {"step": 100}])
@pytest.mark.parametrize("step", [2, STEPS, 8])
def test_a_run_goes_on_from_a_loop(tmp_path: Path, step: int, facts: dict[str, Any], expected: Any) -> None:
    loop = Loop(Net(), DataLoader(DATA))
    loop.run(step)
    loop.engine.save_state(tmp_path / "loop", facts=facts)
    module = Net(seed=9)
    last = 10 if not facts else 100 + 10 - step
    result = run(tmp_path, module, last, resume=tmp_path / "loop")
    assert result.step == last
    assert result.epoch == 1
    assert weights(module) == expected


def test_what_a_run_cannot_know_of_a_loop(tmp_path: Path) -> None:
    engine, module = Engine(accelerator="cpu"), Net()
    engine.prepare(module, *module.configure_optimizers()[0])
    engine.save_state(tmp_path / "without")
    with pytest.raises(ValueError, match="prepared no loader, so its position in the data is unknown"):
        run(tmp_path, Net(), 3, resume=tmp_path / "without")
    assert run(tmp_path, Net(), 3, resume=Resume(tmp_path / "without", weights_only=True)).step == 3


class SavesTwice(Callback):
    """Two saves in the background at one step, of which neither has its copies before the next step is due."""

    def __init__(self, folder: Path, run_first: bool) -> None:
        self.folder, self.run_first, self.expected = folder, run_first, torch.empty(0)

    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        if run.step == 2 and not self.expected.numel():
            self.expected = module.net[0].weight.detach().clone()
            self.engine = run.engine
            for by_run in (self.run_first, not self.run_first):
                if by_run:
                    run.save_checkpoint("a", asynchronous=True)
                else:
                    run.engine.save_state(self.folder / "b", wait=False)


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Staging._copy

    def slowly(self: Staging) -> None:
        time.sleep(0.3)
        copy(self)

    monkeypatch.setattr(Staging, "_copy", slowly)


def test_a_validation_with_averages_waits_for_the_engine_s_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).mean())

    slow_copies(monkeypatch)
    saves = SavesTwice(tmp_path / "other", run_first=True)
    settings: dict[str, Any] = {"max_steps": 6, "val_every": 1, "callbacks": [saves, EMA(0.5)]}
    assert fit(tmp_path, **settings).run(Validated(), loader(), loader()).status == "completed"
    saves.engine.wait_for_checkpoint()
    assert torch.equal(read(tmp_path / "other" / "b").model["module.net.0.weight"], saves.expected)


@pytest.mark.parametrize("run_first", [True, False])
def test_saves_of_a_run_and_of_its_engine_at_one_step(
    tmp_path: Path, run_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch)
    saves = SavesTwice(tmp_path / "other", run_first)
    result = fit(tmp_path, max_steps=6, accumulate_grad_batches=2, callbacks=[saves]).run(Net(), loader())
    assert result.status == "completed"
    saves.engine.wait_for_checkpoint()
    for path, prefix in ((tmp_path / "checkpoints" / "a", ""), (tmp_path / "other" / "b", "module.")):
        assert torch.equal(read(path).model[f"{prefix}net.0.weight"], saves.expected)


def older(directory: Path, *, of_run: bool) -> None:
    """Make a checkpoint what the version before has written."""
    path = directory / "state" / "shared.json"
    shared = json.loads(path.read_text())
    if of_run:
        (entry,) = shared.pop("loaders")
        shared["order"] = entry.get("order")
    path.write_text(json.dumps(shared))
    rank = directory / "state" / "rank=00000.json"
    own = json.loads(rank.read_text())
    if of_run:
        (own["stream"],) = own.pop("streams")
    else:
        own["place"].pop()
    rank.write_text(json.dumps(own))
    manifest = json.loads((directory / "manifest.json").read_text())
    for each in (path, rank):
        manifest["files"][each.relative_to(directory).as_posix()] = record_of(each)
    (directory / "manifest.json").write_text(json.dumps(resummed(manifest)))


@pytest.mark.usefixtures("checkpoints_in_folders")
@pytest.mark.parametrize("by_run", [True, False])
@pytest.mark.parametrize("of_run", [True, False])
def test_checkpoints_of_the_version_before(tmp_path: Path, of_run: bool, by_run: bool, expected: Any) -> None:
    where = tmp_path / "checkpoints" / "here" if of_run else tmp_path / "loop"
    if of_run:
        run(tmp_path, Net(), STEPS, SavesAt(STEPS))
    else:
        loop = Loop(Net())
        loop.run(STEPS)
        loop.engine.save_state(where)
    older(where, of_run=of_run)
    module = Net(seed=9)
    if by_run:
        run(tmp_path, module, 10, resume=where)
    else:
        loop = Loop(module)
        loop.engine.load_state(where)
        loop.done = STEPS
        loop.run(10)
    assert weights(module) == expected
