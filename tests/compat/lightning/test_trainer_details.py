"""Smaller things that a script sees of a ``Trainer``, under both: variables, precisions, hyperparameters, counts, averages, stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, weights
from torch.utils.data import DataLoader, IterableDataset

Case = Callable[[Any, Path], Any]


@pytest.mark.parametrize(
    ("variables", "options", "names"),
    [
        ({"MAX_EPOCHS": "7", "LIMIT_TRAIN_BATCHES": "0.5"}, {}, ("max_epochs", "limit_train_batches")),
        ({"MAX_EPOCHS": "7"}, {"max_epochs": 2}, ("max_epochs",)),
        ({"ACCUMULATE_GRAD_BATCHES": "3", "PRECISION": "bf16-mixed"}, {}, ("accumulate_grad_batches", "precision")),
        ({"FAST_DEV_RUN": "True", "UNKNOWN": "1"}, {}, ("fast_dev_run",)),
        ({"MAX_STEPS": "", "CHECK_VAL_EVERY_N_EPOCH": "4"}, {}, ("max_steps", "check_val_every_n_epoch")),
    ],
)
def test_variables_are_defaults(
    variables: dict[str, str], options: Any, names: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)
    theirs, ours = (quietly(trainer, library, tmp_path, **options) for library in (THEIRS, OURS))
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def test_a_subclass_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("PL_MINE_MAX_EPOCHS", "4")
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "enable_progress_bar": False}
    mine = (type("Mine", (library.Trainer,), {}) for library in (THEIRS, OURS))
    assert [quietly(kind, **quiet).max_epochs for kind in mine] == [4, 4]
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "many")
    with pytest.raises((TypeError, ValueError), match="max_epochs"):
        OURS.Trainer(**quiet)


def default_dtypes(L: Any, folder: Path) -> Any:
    found = []
    for precision in ("64-true", "bf16-true", "32-true", "bf16-mixed"):
        seen: dict[str, str] = {}

        class Net(L.LightningModule):  # type: ignore[misc]
            def note(self, name: str, seen: dict[str, str] = seen) -> None:
                seen.setdefault(name, f"{torch.get_default_dtype()} {torch.zeros(1).dtype}")

            def configure_model(self) -> None:
                self.note("configure_model")
                self.layer = torch.nn.Linear(3, 1)
                self.note(f"made {self.layer.weight.dtype}")

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.note("training_step")
                return self.layer(batch[0].to(self.layer.weight.dtype)).mean()

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.note("validation_step")

            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.note("test_step")

            def predict_step(self, batch: Any, batch_idx: int) -> None:
                self.note("predict_step")

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.note("on_train_batch_start")

            def on_after_backward(self) -> None:
                self.note("on_after_backward")

            def configure_optimizers(self) -> Any:
                self.note("configure_optimizers")
                return torch.optim.SGD(self.parameters(), lr=0.1)

        fitted, net = trainer(L, folder, precision=precision, max_epochs=1), Net()
        fitted.fit(net, data(8), data(4))
        fitted.test(net, data(4), verbose=False)
        fitted.predict(net, data(4))
        found.append(dict(sorted(seen.items())))
        assert torch.get_default_dtype() == torch.float32
        assert not {"training_step", "configure_model"} & vars(net).keys()
    return found


def counts_of_streams(L: Any, folder: Path) -> Any:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([*data(40, 1).dataset])

    loader = DataLoader(Stream())
    fitted = trainer(L, folder, limit_train_batches=10, limit_val_batches=3, max_epochs=1)
    fitted.fit(module(L), loader, loader)
    of_validation = fitted.num_val_batches
    fitted.test(module(L), loader, verbose=False)
    whole = trainer(L, folder, max_steps=2, limit_val_batches=0)
    whole.fit(module(L), loader)
    return of_validation, fitted.num_training_batches, fitted.num_test_batches, whole.num_training_batches


MADE: tuple[dict[str, Any], ...] = {"max_epochs": -1}, {"max_epochs": 2}, {"max_steps": 3}, {"fast_dev_run": 2}


def limits(L: Any, folder: Path) -> Any:
    made = (trainer(L, folder, **options) for options in MADE)
    return [(fitted.max_steps, fitted.fit_loop.max_steps) for fitted in made]


def stops_that_wait(L: Any, folder: Path) -> Any:
    found = []
    for options in ({"min_epochs": 3}, {"min_steps": 12}):
        seen: list[Any] = []
        net = module(L)
        net.on_train_epoch_start = lambda net=net, seen=seen: seen.append(net.trainer.should_stop)
        fitted = trainer(L, folder, max_epochs=6, **options)

        def stop(outputs: Any, batch: Any, batch_idx: int, fitted: Any = fitted) -> None:
            if fitted.global_step == 2:
                fitted.should_stop = True

        net.on_train_batch_end = stop
        fitted.fit(net, data(20))
        found.append((seen, fitted.current_epoch, fitted.global_step, fitted.should_stop))
    return found


def callbacks_of_the_module(L: Any, folder: Path) -> Any:
    Watch, Other = (type(name, (L.Callback,), {}) for name in ("Watch", "Other"))
    net, seen = module(L), []
    net.configure_callbacks = lambda: [Watch(), L.callbacks.EarlyStopping("loss_epoch")]
    net.on_train_start = lambda: seen.append([type(callback).__name__ for callback in fitted.callbacks])
    saves = L.callbacks.ModelCheckpoint(folder)
    fitted = trainer(L, folder, enable_checkpointing=True, callbacks=[saves, Watch(), Other()], max_epochs=1)
    before = [type(callback).__name__ for callback in fitted.callbacks]
    fitted.fit(net, data())
    return before, seen, [type(callback).__name__ for callback in fitted.callbacks], len(fitted.callbacks)


def averages(L: Any, folder: Path) -> Any:
    found = []
    for options in (
        {"update_starting_at_epoch": 1},
        {"update_starting_at_epoch": 1, "update_every_n_steps": 3},
        {"update_starting_at_step": 6, "update_starting_at_epoch": 2},
        {"update_starting_at_step": 9},
        {"update_starting_at_epoch": 5},
        {"update_every_n_steps": 4},
    ):
        average, net = L.callbacks.EMAWeightAveraging(decay=0.5, **options), module(L)
        trainer(L, folder, max_epochs=3, callbacks=[average]).fit(net, data())
        found.append(weights(net).double().round(decimals=5).tolist())
        found.append([average.should_update(step_idx=step) for step in range(9)])
        found.append([average.should_update(epoch_idx=epoch) for epoch in range(4)])
    return found


@pytest.mark.parametrize(
    "case",
    [
        *(default_dtypes, counts_of_streams, limits, stops_that_wait, callbacks_of_the_module),
        pytest.param(averages, marks=pytest.mark.slow),
    ],
    ids=lambda case: str(getattr(case, "__name__", case)),
)
def test_details_are_lightnings(case: Case, tmp_path: Path) -> None:
    theirs, ours = (quietly(case, library, tmp_path / name) for name, library in (("theirs", THEIRS), ("ours", OURS)))
    assert ours == theirs


def data_module(L: Any, **hyperparameters: Any) -> Any:
    class Data(L.LightningDataModule):  # type: ignore[misc]
        def __init__(self, lr: Any = 0.05, width: int = 5, other: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=logger)

        def train_dataloader(self) -> Any:
            return data()

    logger = hyperparameters.pop("logger", True)
    return Data(**hyperparameters)


@pytest.mark.parametrize(
    ("hyperparameters", "logger", "differs"),
    [
        ({}, True, False),
        ({"other": 3}, True, False),
        ({"lr": 1.0}, True, True),
        ({"width": 5.0}, True, True),
        ({"lr": 1.0, "logger": False}, True, False),
        ({"lr": 1.0}, False, False),
    ],
)
def test_hyperparameters_of_module_and_data(
    hyperparameters: dict[str, Any], logger: bool, differs: bool, tmp_path: Path
) -> None:
    for library in (THEIRS, OURS):
        fitted = trainer(
            library, tmp_path, max_epochs=1, logger=library.loggers.CSVLogger(tmp_path) if logger else False
        )
        if differs:
            with pytest.raises(RuntimeError, match=r"lr|width"):
                quietly(fitted.fit, module(library), datamodule=data_module(library, **hyperparameters))
        else:
            quietly(fitted.fit, module(library), datamodule=data_module(library, **hyperparameters))


def schedulers(kind: str, optimizer: Any, other: Any) -> Any:
    of = torch.optim.lr_scheduler
    match kind:
        case "step":
            return of.StepLR(other, 1)
        case "plateau":
            return {"scheduler": of.ReduceLROnPlateau(other), "monitor": "loss_epoch"}
        case "sequence":
            return of.SequentialLR(other, [of.ConstantLR(other), of.StepLR(other, 1)], [1])
        case "own":
            return of.StepLR(optimizer, 1)
    return of.ChainedScheduler([of.StepLR(optimizer, 1), of.StepLR(optimizer, 2)])


@pytest.mark.parametrize("kind", ["step", "plateau", "sequence", "own", "chain"])
def test_a_scheduler_of_an_optimizer_that_is_not_returned(kind: str, tmp_path: Path) -> None:
    def configure(net: Any) -> Any:
        first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
        return [first], [schedulers(kind, first, second)]

    for library in (THEIRS, OURS):
        net = module(library)
        net.configure_optimizers = lambda net=net: configure(net)
        fitted = trainer(library, tmp_path, max_epochs=1)
        if kind in ("own", "chain"):
            quietly(fitted.fit, net, data())
        else:
            with pytest.raises(Exception, match="returned"):
                quietly(fitted.fit, net, data())
