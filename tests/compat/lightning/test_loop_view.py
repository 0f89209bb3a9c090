"""``trainer.fit_loop``: the same counters as Lightning's loops show in the same events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from engine import Fit, TrainModule

lightning: Any = pytest.importorskip("lightning.pytorch")

EVENTS = ("training_step", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start")


class Asked:
    """The body of a module for both libraries."""

    def __init__(self, ask: Any, **options: Any) -> None:
        super().__init__(**options)
        self.layer, self.ask, self.told = torch.nn.Linear(1, 1), ask, {event: [] for event in EVENTS}

    def tell(self, event: str) -> None:
        if not self.trainer.sanity_checking:  # type: ignore[attr-defined]
            self.told[event].append(self.ask(self.trainer))  # type: ignore[attr-defined]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tell("training_step")
        return self.layer(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...
    def on_train_batch_end(self, *_: Any) -> None:
        self.tell("on_train_batch_end")

    def on_train_epoch_start(self) -> None:
        self.tell("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.tell("on_train_epoch_end")

    def on_validation_start(self) -> None:
        self.tell("on_validation_start")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]


class Ours(Asked, TrainModule): ...


class Theirs(Asked, lightning.LightningModule): ...  # type: ignore[misc, name-defined]


def loader(count: int) -> Any:
    return DataLoader(torch.ones(count, 1))  # type: ignore[arg-type]


def both(tmp_path: Path, ask: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    ours, theirs = Ours(ask), Theirs(ask)
    Fit(accelerator="cpu", max_epochs=2, root_dir=tmp_path).run(ours, loader(3), loader(1))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **quiet).fit(
        theirs, loader(3), loader(1)
    )
    return ours.told, theirs.told


def read_counters(trainer: Any) -> dict[str, Any]:
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_loop, loop.epoch_loop.batch_progress
    return {
        "index": (loop.batch_idx, loop.total_batch_idx, epochs.batch_idx, epochs.total_batch_idx),
        "limits": (loop.max_epochs, loop.min_epochs, loop.max_steps, loop.min_steps, loop.max_batches),
        "batches": (batches.current.ready, batches.total.ready, batches.is_last_batch),
        "stepped": (epochs.global_step, epochs._batches_that_stepped),
    }


@pytest.mark.filterwarnings("ignore")  # Lightning's
@pytest.mark.parametrize("kind", ["index", "limits", "batches", "stepped"])
@pytest.mark.parametrize("event", ["training_step", "on_train_batch_end", "on_train_epoch_end", "on_validation_start"])
def test_counters_are_lightnings(tmp_path: Path, event: str, kind: str) -> None:
    ours, theirs = both(tmp_path, read_counters)
    expected = [each[kind] for each in theirs[event]]
    if kind == "stepped" and event in (
        "on_train_batch_end",
        "on_validation_start",
    ):  # Lightning adds the step after these
        expected = [(step, batches + 1) for step, batches in expected]
    assert [each[kind] for each in ours[event]] == expected
    assert ours[event]


@pytest.mark.filterwarnings("ignore")
def test_epochs_done(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, lambda trainer: trainer.fit_loop.epoch_progress.current.completed)
    for event in ("on_train_epoch_start", "training_step", "on_train_batch_end"):
        assert ours[event] == theirs[event]
    assert ours["training_step"] == [0, 0, 0, 1, 1, 1]


class Looks(Ours):
    """Looks at its data where the optimizers are made, as published modules do."""

    def __init__(self) -> None:
        super().__init__(ask=lambda trainer: None)
        self.found: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        self.trainer.fit_loop.setup_data()
        self.found["batches"] = self.trainer.num_training_batches

    def configure_optimizers(self) -> Any:
        loop = self.trainer.fit_loop
        self.found["given"] = loop._data_source.instance.train_dataloader()
        self.found["validates"] = loop.epoch_loop.val_loop._data_source.is_defined()
        self.found["flat"] = loop._combined_loader.flattened
        return super().configure_optimizers()


def test_the_data(tmp_path: Path) -> None:
    module, data = Looks(), loader(3)
    fit = Fit(accelerator="cpu", max_epochs=1, root_dir=tmp_path)
    fit.run(module, data, loader(1))
    assert module.found == {"batches": 3, "given": data, "validates": True, "flat": [data]}
    fit.run(module, [data, data])
    assert module.found == {"batches": 3, "given": [data, data], "validates": False, "flat": [data, data]}
    fit.run(module, {"a": data, "b": data})
    assert module.found["flat"] == [data, data]


def test_nothing_can_be_set(tmp_path: Path) -> None:
    module = Ours(ask=lambda trainer: None)

    def sets(*_: Any) -> None:
        with pytest.raises(AttributeError, match=r"FitLoopView.min_epochs cannot be set: .*Fit's arguments end"):
            module.trainer.fit_loop.min_epochs = sys.maxsize
        with pytest.raises(AttributeError, match=r"no attribute 'manual_optimization': .*self.run.state"):
            _ = module.trainer.fit_loop.epoch_loop.manual_optimization
        module.told["training_step"].append(True)

    module.on_train_start = sets  # type: ignore[method-assign]
    Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path).run(module, loader(1))
    assert module.told["training_step"][0]
