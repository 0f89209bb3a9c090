from __future__ import annotations

import copy
import logging
import math
import random
import sys
import xml.etree.ElementTree as ET
from functools import partial

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from callbacks import find_lr, trial
from callbacks.lr_finder import LRSweep
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


def smoothed(losses):
    """A straight line through the neighbours of each step, with Gaussian weights of 0.05 of the sweep, by numpy's fit."""
    steps = np.arange(len(losses))
    noise = 1.4826 * np.median(np.abs(np.diff(losses))) / 2**0.5
    capped = np.minimum(losses, np.median(losses[: max(3, len(losses) // 3)]) + noise)
    weights = [
        np.exp(-0.25 * ((steps - at) / max(1.5, 0.05 * len(losses))) ** 2) for at in steps
    ]  # polyfit squares them
    return [np.polyval(np.polyfit(steps - at, capped, 1, w=w), 0.0) for at, w in zip(steps, weights, strict=True)]


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
    assert found.results["smoothed"] == pytest.approx(smoothed(by_hand(lrs)), rel=1e-6)
    assert not found.stopped


def test_divergence_begins_at_two_over_the_curvature(fit):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=0.015, max_lr=1.0, num_steps=98, mode="linear", smoothing=0.0)
    lrs, losses = found.results["lr"], found.results["loss"]
    grows = next(i for i in range(len(lrs) - 1) if losses[i + 1] > losses[i])
    assert lrs[grows - 1] <= 2 / CURVATURE < lrs[grows]
    assert found.stopped  # soon after: the loss was nearly 0
    assert losses[-1] > 4 * min(losses[:-1])
    assert lrs[-1] < 1.0


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss(fit):
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-4, max_lr=10.0, num_steps=60)
    lrs = found.results["lr"]
    lowest = 10 + int(np.argmin(smoothed(by_hand(lrs))[10:-1]))
    estimate = found.estimate()
    assert found.suggestion() == estimate.suggestion == pytest.approx(lrs[lowest] / 10, rel=1e-12)
    assert 0.01 < estimate.suggestion < 2 / CURVATURE
    assert estimate.low < estimate.suggestion < estimate.high < 2 / CURVATURE  # a step of every rate in it descends
    assert estimate.warning == ""
    assert LRSweep("linear").suggestion() is None


class Noisy(TrainModule):
    """Classification of noisy labels; the loss of 8 samples varies by a third."""

    def __init__(self, optimizer, lr, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


def noisy_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 20, generator=generator)
    hidden = torch.tanh(0.5 * x @ torch.randn(20, 16, generator=generator))
    noise = torch.randn(4096, 5, generator=generator)
    return TensorDataset(x, (hidden @ torch.randn(16, 5, generator=generator) + noise).argmax(dim=1))


def trained_loss(optimizer, lr):
    """The loss after 300 steps of a bare loop."""
    data, module = noisy_data(), Noisy(optimizer, lr, 0)
    steps = module.configure_optimizers()
    for indices in torch.randint(0, 4096, (300, 8), generator=torch.Generator().manual_seed(1)):
        steps.zero_grad()
        module.training_step(data[indices], 0).backward()
        steps.step()
    with torch.no_grad():
        return float(module.training_step(data.tensors, 0).nan_to_num(math.inf))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD, torch.optim.Adam],
    ids=["momentum", "sgd", "adam"],
)
def test_a_noisy_sweep_suggests_a_rate_that_trains_or_warns(fit, optimizer):
    losses = {lr: trained_loss(optimizer, lr) for lr in [10 ** (-place / 2) for place in range(9)]}
    good = [lr for lr, loss in losses.items() if loss < 1.1 * min(losses.values())]
    loader = DataLoader(noisy_data(), batch_size=8, shuffle=True)

    def sweep(seed, steps):
        module = Noisy(optimizer, 1.0, seed)
        return find_lr(module, loader, fit=fit, max_lr=10.0, num_steps=steps, picture=None).estimate()

    near = [
        (min(good) / 3.2 <= estimate.suggestion <= 3.2 * max(good), estimate)
        for estimate in (sweep(seed, 120) for seed in range(8))
    ]
    assert all(fits or estimate.warning for fits, estimate in near), (good, near)
    assert sum(fits for fits, _ in near) >= 7, (good, near)
    assert sum(not estimate.warning for _, estimate in near) >= 4, (good, near)
    assert all(estimate.low / 3.2 <= max(good) and min(good) <= 3.2 * estimate.high for _, estimate in near)
    assert all("steps are few" in sweep(seed, 30).warning for seed in range(3))


def sweep_of(losses, min_lr=1e-6, max_lr=1.0, **options):
    lrs = np.geomspace(min_lr, max_lr, len(losses)).tolist()
    found = LRSweep("exponential", {"lr": lrs, "loss": list(losses), "smoothed": []}, **options)
    found.smooth()
    return found


def test_a_curve_that_says_little_has_a_warning():
    noise = np.random.default_rng(0).normal(size=120)
    falling = 5 - 4 * np.clip(np.linspace(-2, 1, 120), 0, 1)
    rising = np.where(np.arange(120) < 100, falling, 1 + 0.5 * (np.arange(120) - 100))
    assert "hardly falls" in sweep_of(1 + noise).estimate().warning
    assert "larger max_lr" in sweep_of(falling + 0.05 * noise).estimate().warning
    clear = sweep_of(rising + 0.05 * noise, stopped=True).estimate()
    assert clear.warning == ""
    lowest = 1e-6 * 10 ** (6 * 100 / 119)
    assert lowest / 30 < clear.suggestion < lowest / 3
    assert clear.high / clear.low < 30
    assert (
        "20 steps are few for learning rates from 1e-06 to 1: give num_steps=120"
        in sweep_of(rising[::6]).estimate().warning
    )


def test_a_long_sweep_and_one_that_ends_in_nan():
    steps = np.linspace(-6, 0, 4001)
    losses = 2 - np.exp(-((steps + 1.5) ** 2))
    found = sweep_of([*losses, math.nan])
    assert found.suggestion() == pytest.approx(10**-2.5, rel=0.05)
    assert len(found.results["smoothed"]) == 4002
    assert found.results["smoothed"][:3950] == pytest.approx(losses[:3950].tolist(), abs=0.1)


@pytest.mark.parametrize("losses", [[], [1.0], [math.nan], [1.0, math.inf], [1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
def test_the_picture_of_hardly_any_losses(losses, tmp_path):
    found = LRSweep(
        "exponential", {"lr": [10.0**-n for n in range(len(losses), 0, -1)], "loss": losses, "smoothed": []}
    )
    found.smooth()
    ET.parse(found.save(tmp_path / "few.svg"))
    assert (found.suggestion() is None) == (len(losses) < 4)


def test_the_log_says_how_sure_the_suggestion_is(fit, caplog):
    caplog.set_level(logging.INFO, "engine")
    found = find_lr(Quadratic(), BATCHES, fit=fit, num_steps=30)
    estimate = found.estimate()
    said = f"find_lr: suggestion {estimate.suggestion:.3g}, stable from {estimate.low:.3g} to {estimate.high:.3g}; picture: "
    assert any(line.startswith(said) for line in caplog.messages)
    assert f"find_lr: do not rely on the suggestion {estimate.suggestion:.3g}: 30 steps are few for" in caplog.text


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


def test_the_generator_of_a_sampler_inside_a_batch_sampler_stays_as_it_was(tmp_path):
    data = TensorDataset(torch.randn(12, 1, dtype=torch.float64))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False))
    with trial._restored_generators(loader):
        list(loader)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


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
    found = find_lr(Quadratic(), BATCHES, fit=fit, min_lr=1e-4, max_lr=10.0, num_steps=80)
    drawn = ET.parse(tmp_path / "find_lr.svg").getroot()
    parts = {
        name: [part for part in drawn.iter() if part.tag.endswith(name)]
        for name in ("polyline", "circle", "text", "rect")
    }
    count = len(found.results["lr"])
    assert len(parts["polyline"][0].get("points").split()) == count
    assert len(parts["circle"]) == count + 1  # and one in the legend
    texts = [part.text for part in parts["text"]]
    estimate = found.estimate()
    assert f"suggestion: {estimate.suggestion:.3g}" in texts
    assert f"stable from {estimate.low:.3g} to {estimate.high:.3g}" in texts
    assert {"0.0001", "0.001", "0.01", "0.1", "1", "learning rate (logarithmic)", "loss", "smoothed"} <= set(texts)
    # The range is drawn where it is: equal factors of the learning rate are equally wide.
    place = {part.text: float(part.get("x")) for part in parts["text"] if part.get("x")}
    left, decade = place["0.0001"], place["0.001"] - place["0.0001"]
    bounds = [left + decade * math.log10(lr / 1e-4) for lr in (estimate.low, estimate.high)]
    marked = float(parts["rect"][1].get("x")), float(parts["rect"][1].get("width"))
    assert marked == pytest.approx((bounds[0], bounds[1] - bounds[0]), abs=0.2)


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
from callbacks import find_lr, trial
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
