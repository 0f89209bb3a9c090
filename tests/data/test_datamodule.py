"""DataModule: the order of its methods, and its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch.utils.data import TensorDataset

from engine import Callback, DataModule


class Notes(DataModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[str] = []
        self.count = 0

    def prepare_data(self) -> None:
        self.seen.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.seen.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.seen.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.seen.append("train_dataloader")
        return ones(3, self.hparams.size)

    def val_dataloader(self) -> Any:
        self.seen.append("val_dataloader")
        return ones(1)

    def test_dataloader(self) -> Any:
        self.seen.append("test_dataloader")
        return [torch.full((1, 1), 4.0), torch.full((3, 1), 8.0)]

    def predict_dataloader(self) -> Any:
        self.seen.append("predict_dataloader")
        return ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_the_order_of_a_training(tmp_path: Path) -> None:
    data, module = Notes(), Weight()
    fit(tmp_path).run(module, datamodule=data)
    assert data.seen == ["prepare_data", "setup fit", "train_dataloader", "val_dataloader", "teardown fit"]
    assert module.w.item() == -3.0


def test_the_order_of_the_others(tmp_path: Path) -> None:
    data, module = Notes(), Weight(1.0)
    assert fit(tmp_path).validate(module, datamodule=data) == [{"val": 1.0}]
    assert fit(tmp_path).test(module, datamodule=data) == [{"test": (4.0 + 3 * 8.0) / 4}]
    assert [p.tolist() for p in fit(tmp_path).predict(module, datamodule=data)] == [[[1.0], [1.0]]] * 2
    assert data.seen == [
        *("prepare_data", "setup validate", "val_dataloader", "teardown validate"),
        *("prepare_data", "setup test", "test_dataloader", "teardown test"),
        *("prepare_data", "setup predict", "predict_dataloader", "teardown predict"),
    ]


def test_it_may_stand_in_the_place_of_the_loader(tmp_path: Path) -> None:
    data, module = Notes(), Weight()
    fit(tmp_path).run(module, data)
    assert module.w.item() == -3.0
    assert fit(tmp_path).test(module, data) == [{"test": 7.0}]
    with pytest.raises(ValueError, match="two data modules"):
        fit(tmp_path).run(module, data, datamodule=data)


def test_a_loader_that_is_given_goes_before_its_own(tmp_path: Path) -> None:
    data, module = Notes(), Weight()
    fit(tmp_path).run(module, ones(1), datamodule=data)
    assert module.w.item() == -1.0
    assert "train_dataloader" not in data.seen


def test_teardown_after_an_error(tmp_path: Path) -> None:
    class Fails(Notes):
        def train_dataloader(self) -> Any:
            raise OSError("no disk")

    data = Fails()
    with pytest.raises(OSError, match="no disk"):
        fit(tmp_path).run(Weight(), datamodule=data)
    assert data.seen == ["prepare_data", "setup fit", "teardown fit"]


def test_teardown_after_an_error_in_the_sanity_check(tmp_path: Path) -> None:
    class Fails(Weight):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise OSError("no disk")

    data = Notes()
    with pytest.raises(OSError, match="no disk"):
        fit(tmp_path, num_sanity_val_steps=1).run(Fails(), datamodule=data)
    assert data.seen[-1] == "teardown fit"


def test_its_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Counts(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            run.datamodule.count += 10
            if run.step == 2:
                run.save_checkpoint()

    data = Notes()
    fit(tmp_path, callbacks=Counts()).run(Weight(), datamodule=data)
    assert data.count == 30
    again = Notes()
    fit(tmp_path).run(Weight(), datamodule=again, resume="last")
    assert again.count == 20  # as it was saved after two steps


def test_hyperparameters() -> None:
    class Careless(DataModule):
        def __init__(self, path: str, size: int = 3) -> None:
            self.save_hyperparameters(ignore="path")

    assert Notes(5).hparams == {"size": 5}
    assert Careless("p").hparams == {"size": 3}
    assert Careless("p").hparams.size == 3


def test_a_dataset_without_a_loader(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError,
        match=r"TensorDataset is a dataset of samples: give DataLoader\(dataset, batch_size=32, shuffle=True\)",
    ):
        fit(tmp_path).run(Weight(), TensorDataset(torch.ones(3, 1)))


def test_no_data_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training data: give"):
        fit(tmp_path).run(Weight(), datamodule=DataModule())
    with pytest.raises(ValueError, match="no data: DataModule has no test_dataloader: define it"):
        fit(tmp_path).test(Weight(), datamodule=DataModule())
