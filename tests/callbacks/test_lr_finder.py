from __future__ import annotations

import copy
import math
import random
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from callbacks import find_lr
from callbacks.lr_sweep import LRSweep
from engine import Fit, Loss, TrainModule
from engine.utils import accelerator

CURVATURE = 4.0  # SGD diverges above 2 / 4


class Quadratic(TrainModule):
    """The loss (CURVATURE / 2) * w ** 2, from w = 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return 0.5 * CURVATURE * self.weight**2

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=123.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def by_hand(lrs):
    """Losses of plain gradient descent with these learning rates."""
    weight, losses = 1.0, []
    for lr in lrs:
        losses.append(0.5 * CURVATURE * weight**2)
        weight -= lr * CURVATURE * weight
    return losses


@pytest.fixture
def fit(tmp_path):
    return Fit(accelerator="cpu", devices=1, root_dir=tmp_path, max_epochs=7, log_every_n_steps=1)


BATCHES = [torch.ones(2, 1) for _ in range(3)]


def test_a_device_without_float64_sums_in_float32(fit, monkeypatch):
    monkeypatch.setattr(accelerator, "wide", lambda device: torch.float32)
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-3, max_lr=10.0, num_steps=11, early_stop_threshold=None)
    lrs = [1e-3 * 10 ** (4 * i / 10) for i in range(11)]
    assert found.results["loss"] == pytest.approx(by_hand(lrs), rel=1e-5)
    assert found.results["loss"] != pytest.approx(by_hand(lrs), rel=1e-12)


def test_losses_and_rates_are_those_of_plain_descent(fit):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-3, max_lr=10.0, num_steps=41, early_stop_threshold=None)
    lrs = [1e-3 * 10 ** (4 * i / 40) for i in range(41)]
    assert found.results["lr"] == pytest.approx(lrs, rel=1e-12)
    assert found.results["loss"] == pytest.approx(by_hand(lrs), rel=1e-9)
    average, expected = 0.0, []
    for i, loss in enumerate(by_hand(lrs)):
        average = 0.98 * average + 0.02 * loss
        expected.append(average / (1 - 0.98 ** (i + 1)))
    assert found.results["smoothed"] == pytest.approx(expected, rel=1e-9)
    assert not found.stopped


def test_divergence_begins_at_two_over_the_curvature(fit):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=0.015, max_lr=1.0, num_steps=98, mode="linear", smoothing=0.0)
    lrs, losses = found.results["lr"], found.results["loss"]
    grows = next(i for i in range(len(lrs) - 1) if losses[i + 1] > losses[i])
    assert lrs[grows - 1] <= 2 / CURVATURE < lrs[grows]
    assert found.stopped  # soon after: the loss was nearly 0
    assert losses[-1] > 4 * min(losses[:-1])
    assert lrs[-1] < 1.0


def test_the_suggestion_is_the_steepest_descent(fit):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-4, max_lr=0.4, num_steps=60)
    lrs = [1e-4 * 4000 ** (i / 59) for i in range(60)]
    average, smoothed = 0.0, []
    for i, loss in enumerate(by_hand(lrs)):
        average = 0.98 * average + 0.02 * loss
        smoothed.append(average / (1 - 0.98 ** (i + 1)))
    expected = lrs[10 + int(np.gradient(smoothed[10:-1]).argmin())]
    assert found.suggestion() == pytest.approx(expected, rel=1e-12)
    assert 0.001 < expected < 0.4
    assert LRSweep("linear").suggestion() is None


def test_nothing_of_the_user_changes(tmp_path):
    class Dropping(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout())

        def training_step(self, batch, batch_idx):
            random.random()
            np.random.rand()
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

        def configure_callbacks(self):
            raise AssertionError("not asked for")

    module = Dropping()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True, generator=generator)
    fit = Fit(accelerator="cpu", devices=1, root_dir=tmp_path, seed=5, max_epochs=2, callbacks=[])
    before = copy.deepcopy(module.state_dict())
    states = generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    find_lr(module, loader, fit=fit, num_steps=5, picture=None)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]
    assert (np.random.get_state()[1] == states[3]).all()
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert not list(tmp_path.iterdir())
    assert (fit.settings.max_epochs, fit.settings.seed) == (2, 5)


def test_weighted_losses_and_windows(tmp_path):
    class Tokens(Quadratic):
        def training_step(self, batch, batch_idx):
            return {"loss": Loss((self.weight * batch).sum(), batch.numel())}

    batches = [torch.full((n, 1), float(n), dtype=torch.float64) for n in (1, 3)] * 2
    fit = Fit(accelerator="cpu", devices=1, root_dir=tmp_path, accumulate_grad_batches=2)
    found = find_lr(Tokens(), batches, fit=fit, min_lr=0.1, max_lr=0.2, num_steps=2, picture=None)
    # The mean over 1 token of value 1 and 3 of value 3 is 2.5, and so is the gradient.
    assert found.results["lr"] == [0.1, 0.2]
    assert found.results["loss"] == pytest.approx([2.5, 2.5 * (1 - 0.1 * 2.5)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "log"}, "mode='log'"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "0 < min_lr < max_lr"),
        ({"min_lr": 0.0}, "0 < min_lr < max_lr"),
        ({"num_steps": 1}, "num_steps=1"),
        ({"early_stop_threshold": 0.5}, "above 1"),
        ({"smoothing": 1.0}, r"\[0, 1\)"),
    ],
)
def test_arguments_that_are_not_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        find_lr(Quadratic(), BATCHES, **arguments)


def test_modules_and_loaders_that_cannot_be_swept(fit):
    class ByHand(Quadratic):
        automatic_optimization = False

    class Two(Quadratic):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=1.0), torch.optim.SGD(self.parameters(), lr=1.0)]

    with pytest.raises(ValueError, match="ByHand has automatic_optimization = False"):
        find_lr(ByHand(), BATCHES, fit=fit)
    with pytest.raises(ValueError, match="Two has 2 optimizers"):
        find_lr(Two(), BATCHES, fit=fit)
    with pytest.raises(ValueError, match="can be read only once"):
        find_lr(Quadratic(), iter(BATCHES), fit=fit)


def test_the_picture(fit, tmp_path):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-4, max_lr=0.4, num_steps=30)
    drawn = ET.parse(tmp_path / "find_lr.svg").getroot()
    lines = [each.get("points") for each in drawn.iter() if each.tag.endswith("polyline")]
    assert [len(points.split()) for points in lines] == [30, 30]
    texts = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert f"suggestion: {found.suggestion():.3g}" in texts
    assert {"0.0001", "0.4"} <= set(texts)


def test_a_picture_by_matplotlib(fit, tmp_path, monkeypatch):
    found = LRSweep("exponential", {"lr": [0.1, 0.2], "loss": [1.0, math.nan], "smoothed": [1.0, math.nan]})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib, or save it as"):
        found.save(tmp_path / "x.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert found.save(tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from callbacks import find_lr
from engine import Fit, TrainModule

class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

data = TensorDataset(torch.arange(8, dtype=torch.float64).reshape(8, 1))
module = Line()
torch.manual_seed(1)
before = torch.get_rng_state()
fit = Fit(accelerator="cpu", strategy="ddp", root_dir=sys.argv[1])
found = find_lr(module, DataLoader(data, batch_size=2), fit=fit, mode="linear", min_lr=0.0, max_lr=0.1, num_steps=3)
same = torch.equal(before, torch.get_rng_state())
result = fit.run(module, DataLoader(data, batch_size=2))  # the same processes train afterwards
report([found.results, float(module.weight), same, result.step])
"""


def test_two_ranks_agree(tmp_path):
    first, second = (rank.value for rank in run_ranks(SCRIPT, 2, tmp_path))
    assert first == second
    results, weight, same_numbers, steps = first
    # Steps of 4 samples each, with means 1.5, 5.5 and (next epoch) 1.5, at learning rates 0, 0.05 and 0.1.
    assert results["lr"] == pytest.approx([0.0, 0.05, 0.1])
    assert results["loss"] == pytest.approx([1.5, 5.5, 1.5 * (1 - 0.05 * 5.5)])
    assert weight == 1 - 1.5 - 5.5  # the training started from the untouched weight
    assert same_numbers
    assert steps == 2
    assert (tmp_path / "find_lr.svg").exists()
