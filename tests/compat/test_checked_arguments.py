"""Drop-in constructors check every argument against its annotation, and take what the other trainer takes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.toys import ones

from engine.compat.accelerate.accelerator import Accelerator
from engine.compat.accelerate.local_sgd import LocalSGD
from engine.compat.accelerate.utils import dataclasses
from engine.compat.lightning import callbacks, loggers, strategies
from engine.compat.lightning.module import LightningModule
from engine.compat.lightning.trainer import Trainer

REQUIRED: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "EarlyStopping": {"monitor": "loss"},
    "SavesOnException": {"dirpath": "x"},
    "GradientAccumulationScheduler": {"scheduling": {0: 1}},
    "TensorBoardLogger": {"save_dir": "x"},
    "CSVLogger": {"save_dir": "x"},
    "LocalSGD": {"accelerator": None, "model": None, "local_sgd_steps": 1},
}

ADAPTED = [(Trainer, "callbacks"), (Trainer, "logger"), (LocalSGD, "accelerator")]
"""Arguments that take objects of other classes."""


def arguments() -> Iterator[tuple[type, str]]:
    """Each argument with a type of each class whose arguments are checked."""
    classes = {cls for module in (callbacks, loggers) for cls in vars(module).values() if isinstance(cls, type)}
    for cls in sorted({*classes, Trainer, Accelerator, LocalSGD}, key=lambda each: each.__name__):
        init = vars(cls).get("__init__")
        if hasattr(init, "__wrapped__"):
            hints = typing.get_type_hints(init.__wrapped__)  # type: ignore[union-attr]
            named = {
                name for name, each in inspect.signature(cls).parameters.items() if each.kind is not each.VAR_KEYWORD
            }
            yield from (
                (cls, name)
                for name, hint in hints.items()
                if name in named and hint is not Any and (cls, name) not in ADAPTED
            )


@pytest.mark.parametrize(("cls", "name"), list(arguments()), ids=lambda each: getattr(each, "__name__", each))
def test_every_argument_is_checked(cls: type, name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: {name}=<object object at .*> is of type object: give "):
        cls(**{**REQUIRED.get(cls.__name__, {}), name: object()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: callbacks.ModelCheckpoint(save_last="banana"),  # type: ignore[arg-type]
            "ModelCheckpoint: save_last='banana' is unknown; possible: 'link', or bool",
        ),
        (
            lambda: callbacks.ModelCheckpoint(every_n_train_steps=""),  # type: ignore[arg-type]
            "ModelCheckpoint: every_n_train_steps='' is of type str: give int or None",
        ),
        (
            lambda: callbacks.ModelCheckpoint(every_n_epochs=-3),
            "ModelCheckpoint: every_n_epochs=-3 is not possible: give an int from 0 to 4611686018427387904, or None for never",
        ),
        (
            lambda: callbacks.EarlyStopping("loss", stopping_threshold="0.1"),  # type: ignore[arg-type]
            "EarlyStopping: stopping_threshold='0.1' is of type str: give float or None",
        ),
        (
            lambda: callbacks.EarlyStopping("loss", patience=float("nan")),
            "EarlyStopping(patience=nan): patience must be 0 or more checks",
        ),
        (
            lambda: callbacks.StochasticWeightAveraging(b"x"),  # type: ignore[arg-type]
            "StochasticWeightAveraging: swa_lrs=b'x' is of type bytes: give float or a list of float",
        ),
        (
            lambda: callbacks.StochasticWeightAveraging(float("inf")),
            "SWA(swa_lrs=inf): it must be a positive number, a list of them, or None",
        ),
        (
            lambda: callbacks.StochasticWeightAveraging(0.1, device="banana"),
            "StochasticWeightAveraging(device='banana'): Expected one of cpu, ",
        ),
        (
            lambda: callbacks.GradientAccumulationScheduler({0: 0}),
            "GradientAccumulationScheduler(scheduling={0: 0}): accumulate_grad_batches={0: 0} is not possible: give an int of at least 1",
        ),
        (
            lambda: callbacks.LambdaCallback(on_train_start=3),  # type: ignore[arg-type]
            "LambdaCallback: on_train_start=3 is of type int: give Callable or None",
        ),
        (
            lambda: loggers.CSVLogger("x", version=2.5),  # type: ignore[arg-type]
            "CSVLogger: version=2.5 is of type float: give int, str or None",
        ),
        (
            lambda: strategies.DDPStrategy(find_unused_parameters="banana"),
            "DDPStrategy: find_unused_parameters='banana' is of type str: give bool",
        ),
        (
            lambda: strategies.SingleDeviceStrategy("banana"),
            "SingleDeviceStrategy(device='banana'): Expected one of cpu, ",
        ),
        (
            lambda: Trainer(strategy=strategies.SingleDeviceStrategy("cuda:7"), accelerator="cpu"),
            "SingleDeviceStrategy(device='cuda:7') contradicts Trainer(accelerator='cpu', devices='auto')",
        ),
        (lambda: Trainer(logger=3), "Trainer: logger=3 is of type int: give True, False, a Logger"),  # type: ignore[arg-type]
        (
            lambda: Trainer(val_check_interval=float("nan")),
            "Trainer(val_check_interval=nan, check_val_every_n_epoch=1): give ",
        ),
        (
            lambda: LocalSGD(None, None, "2"),  # type: ignore[arg-type]
            "LocalSGD: local_sgd_steps='2' is of type str: give int",
        ),
        (lambda: LocalSGD(None, None, 0), "LocalSGD: local_sgd_steps=0 is not possible: give an int of at least 1"),  # type: ignore[arg-type]
        (
            lambda: dataclasses.GradScalerKwargs(init_scale="big"),
            "GradScalerKwargs: init_scale='big' is of type str: give float",
        ),
        (
            lambda: dataclasses.ProjectConfiguration(automatic_checkpoint_naming="no"),
            "ProjectConfiguration: automatic_checkpoint_naming='no' is of type str: give bool",
        ),
    ],
)
def test_the_error_has_argument_value_and_what_is_possible(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_values_that_the_other_trainer_takes(tmp_path: Path) -> None:
    saved = callbacks.ModelCheckpoint(tmp_path, save_last="link", save_top_k=numpy.int64(2), every_n_train_steps=0)  # type: ignore[arg-type]
    assert (saved.dirpath, saved.save_last, saved.save_top_k) == (str(tmp_path), True, 2)
    callbacks.ModelCheckpoint(train_time_interval=timedelta(minutes=1), verbose=numpy.True_)  # type: ignore[arg-type]
    stopping = callbacks.EarlyStopping("loss", 0, float("inf"), stopping_threshold=torch.tensor(0.5))  # type: ignore[arg-type]
    assert (stopping.min_delta, stopping.patience, stopping.stopping_threshold) == (0.0, float("inf"), 0.5)
    assert callbacks.StochasticWeightAveraging(numpy.float64(0.1), 1, device="cpu").swa_lrs == 0.1
    assert callbacks.StochasticWeightAveraging([1, numpy.float32(0.5)]).swa_lrs == [1.0, 0.5]  # type: ignore[list-item]
    assert callbacks.GradientAccumulationScheduler({numpy.int64(0): numpy.int64(2)}).scheduling == {0: 2}  # type: ignore[dict-item]
    assert loggers.CSVLogger(tmp_path, version=numpy.int64(3)).log_dir == str(tmp_path / "lightning_logs/version_3")  # type: ignore[arg-type]
    assert dataclasses.DistributedDataParallelKwargs(bucket_cap_mb=numpy.int64(5)).to_kwargs() == {"bucket_cap_mb": 5}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_takes_the_device_of_its_strategy(tmp_path: Path) -> None:
    for device in (None, "cpu", torch.device("cpu", 0)):
        trainer = Trainer(
            strategy=strategies.SingleDeviceStrategy(device),
            max_steps=numpy.int64(1),  # type: ignore[arg-type]
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(Module(), ones(1))
        assert (trainer.global_step, trainer.strategy.root_device) == (1, torch.device("cpu"))
