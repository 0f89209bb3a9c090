"""Schedule-free optimizers: a run trains with their one kind of weights, and evaluates, saves and ends with the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from support.toys import fit
from torch import Tensor, nn

from callbacks import ModelCheckpoint
from engine import Resume, TrainModule
from engine.step.optimizers import Modes


class Net(TrainModule):
    def __init__(self, kind: str = "adam", rate: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind, self.rate = nn.Linear(3, 2), kind, rate
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.linear(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(weights(self))

    def configure_optimizers(self) -> Any:
        if self.kind == "adam":
            return schedulefree.AdamWScheduleFree(self.parameters(), lr=self.rate, warmup_steps=2)
        return schedulefree.SGDScheduleFree(self.parameters(), lr=self.rate)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def weights(module: nn.Module) -> list[float]:
    return [value for p in module.parameters() for value in p.detach().flatten().tolist()]


def data(count: int = 8) -> list[Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def bare(kind: str, *steps: int) -> list[list[float]]:
    """The weights to be used after so many steps, each time from a loop that never looked before."""
    found = []
    for count in steps:
        module = Net(kind)
        optimizer = module.configure_optimizers()
        optimizer.train()
        for batch in data(count):
            module.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        found.append(weights(module))
    return found


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("module_class", [Net, Manual])
def test_what_is_evaluated_saved_and_left(tmp_path: Path, kind: str, module_class: type[Net]) -> None:
    module, expected = module_class(kind), bare(kind, 0, 3, 6, 8)
    checkpoint = ModelCheckpoint(every="2 steps", keep_every="2 steps")
    fit(tmp_path, val_every="3 steps", num_sanity_val_steps=1, callbacks=checkpoint).run(module, data(), data(1))
    assert module.seen == expected[:3]
    assert weights(module) == expected[3]
    for step, wanted in zip((2, 4, 8), bare(kind, 2, 4, 8), strict=True):
        saved = module_class.load_from_checkpoint(tmp_path / "checkpoints" / f"step={step:08d}")
        assert weights(saved) == wanted


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=3, callbacks=ModelCheckpoint(every="3 steps")).run(Net(), data())
    module = Net()
    fit(tmp_path, val_every="5 steps").run(module, data(), data(1), resume="last")
    assert [*module.seen, weights(module)] == bare("adam", 5, 8)
    # A finished run that is given more epochs, too.
    fit(tmp_path / "other", callbacks=ModelCheckpoint()).run(Net(), data(4))
    longer, whole = Net(), Net()
    fit(tmp_path / "other", max_epochs=2).run(longer, data(4), resume="last")
    fit(tmp_path / "whole", max_epochs=2).run(whole, data(4))
    assert weights(longer) == weights(whole)


def test_its_counters_are_no_hyperparameters(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=3, callbacks=ModelCheckpoint()).run(Net(), data())
    module = Net()
    run = fit(tmp_path, max_steps=8)
    run.run(module, data(), resume=Resume("last", hyperparameters="configured"))
    assert weights(module) == bare("adam", 8)[0]


def test_an_error_leaves_the_weights_to_be_used(tmp_path: Path) -> None:
    class Fails(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                raise KeyError("batch")

    module = Fails()
    with pytest.raises(KeyError):
        fit(tmp_path).run(module, data())
    assert weights(module) == bare("adam", 5)[0]


def test_other_optimizers_are_left_alone() -> None:
    assert not Modes([torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)]).switched
