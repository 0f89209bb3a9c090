"""A callback that joins a run on resume: the others keep their states, and train on as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import (
    EMA,
    SWA,
    BackboneFinetuning,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from engine import Callback, TrainModule

STEPS = 4


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(3, 2), nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(self.backbone(batch)) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        groups = [{"params": part.parameters()} for part in (self.head, self.backbone)]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Look(Callback):
    """The states of the others before the first step."""

    def on_train_start(self, run: Any, module: nn.Module) -> None:
        self.states = {c.state_key: c.state_dict() for c in run.callbacks if c.state_dict()}


def usual() -> list[Callback]:
    return [EMA(0.5), EarlyStopping("loss", patience=7), ModelCheckpoint(monitor="loss", save_top_k=3, every="3 steps")]


ADDED: dict[str, Any] = {
    "logger": CSVLogger,
    "monitor": LearningRateMonitor,
    "second average": lambda: EMA(0.9, name="slow"),
    "swa": lambda: SWA(None, 2),
    "second stopping": lambda: EarlyStopping("loss", mode="max", patience=9),
    "second checkpoint": lambda: ModelCheckpoint(every="2 steps"),
    "finetuning": lambda: BackboneFinetuning(0),
    "function": lambda: LambdaCallback(on_train_start=lambda run, module: None),
}


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", ADDED)
def test_an_added_callback_keeps_the_state_of_the_others(make_fit, tmp_path, name, first):
    data = [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
    begun = make_fit(callbacks=usual(), max_epochs=2).run(Net(), data, data)

    def resumed(place: str, callbacks: list[Callback]) -> tuple[dict[str, Any], Net]:
        look, module = Look(), Net()
        fit = make_fit(callbacks=[*callbacks, look], max_epochs=3, root_dir=tmp_path / place)
        fit.run(module, data, data, resume=begun.last_checkpoint)
        return look.states, module

    expected, plain = resumed("as before", usual())
    added = ADDED[name]()
    states, module = resumed("added", [added, *usual()] if first else [*usual(), added])
    assert len(expected) == 3
    assert {key: states[key] for key in expected} == expected
    assert expected["EMA[name='ema']"]["n_averaged"] == 2 * STEPS
    if not (first and isinstance(added, EMA)) and not isinstance(added, SWA):  # otherwise the module has other averages
        assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
