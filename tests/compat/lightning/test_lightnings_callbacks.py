"""Each callback of the installed Lightning, under our ``Trainer`` and ``Fit``: it trains as there, or is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, weights
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks import ModelCheckpoint
from engine import Fit
from engine.compat.lightning.names import BOUND


class Unfreezes(theirs.BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


class Writes(theirs.BasePredictionWriter):
    """A user's class."""


ARGUMENTS: dict[str, Callable[[Path], Any]] = {
    "BackboneFinetuning": lambda folder: theirs.BackboneFinetuning(1),
    "BaseFinetuning": lambda folder: Unfreezes(),
    "BasePredictionWriter": lambda folder: Writes(),
    "EarlyStopping": lambda folder: theirs.EarlyStopping("val", patience=1, min_delta=10.0),
    "GradientAccumulationScheduler": lambda folder: theirs.GradientAccumulationScheduler({1: 2}),
    "ModelPruning": lambda folder: theirs.ModelPruning("l1_unstructured"),
    "OnExceptionCheckpoint": lambda folder: theirs.OnExceptionCheckpoint(folder),
    "SpikeDetection": lambda folder: theirs.SpikeDetection(atol=50.0, rtol=50.0),
    "StochasticWeightAveraging": lambda folder: theirs.StochasticWeightAveraging(0.01),
    "ThroughputMonitor": lambda folder: theirs.ThroughputMonitor(len),
    "Timer": lambda folder: theirs.Timer(timedelta(microseconds=1), "epoch"),
}
"""Callbacks that need arguments. The others are made without."""


def made(name: str, folder: Path) -> Any:
    return ARGUMENTS.get(name, lambda folder: getattr(theirs, name)())(folder)


def net(name: str) -> Any:
    """Lightning's module; for fine-tuning its optimizer has only the parameters that are trained from the start."""
    found = module(THEIRS)
    found.backbone = found.layers[0]
    if name.endswith("Finetuning"):
        type(found).configure_optimizers = lambda self: torch.optim.SGD(self.layers[2].parameters(), lr=0.05)
    return found


def with_trainer(library: Any, name: str, trained: Any, folder: Path) -> None:
    options = {"enable_checkpointing": True, "enable_progress_bar": None}
    fitted = trainer(library, folder, max_epochs=2, callbacks=[made(name, folder)], **options)
    quietly(fitted.fit, trained, data(), data())


def with_fit(library: Any, name: str, trained: Any, folder: Path) -> None:
    callbacks = [made(name, folder), ModelCheckpoint()]
    Fit(max_epochs=2, accelerator="cpu", callbacks=callbacks, root_dir=folder).run(trained, data(), data())


@pytest.mark.parametrize("name", theirs.__all__)
def test_it_trains_as_there_or_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = net(name)
    if name not in BOUND:
        with_trainer(THEIRS, name, expected, tmp_path / "theirs")
    for run in (with_trainer, with_fit):
        trained = net(name)
        if name in BOUND:
            with pytest.raises(NotImplementedError, match="works only under Lightning's own Trainer") as refused:
                run(OURS, name, trained, tmp_path / run.__name__)
            assert str(refused.value).endswith(BOUND[name])
            assert trained.seen == []
        else:
            run(OURS, name, trained, tmp_path / run.__name__)
            torch.testing.assert_close(weights(trained), weights(expected), rtol=0, atol=1e-6)


def test_a_monitor_that_nobody_logs(tmp_path: Path) -> None:
    for library in (THEIRS, OURS):
        saves = theirs.ModelCheckpoint(tmp_path, monitor="nothing")
        fitted = trainer(library, tmp_path, max_epochs=1, callbacks=[saves], enable_checkpointing=True)
        with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
            quietly(fitted.fit, module(THEIRS), data(), data())
