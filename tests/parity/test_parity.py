"""A bare PyTorch loop, an ``Engine`` loop and a ``Fit`` run of one model: the same bits after 50 steps; two ranks as one to 1e-6."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import Engine, Fit, TrainModule

STEPS, BATCH = 50, 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Net(TrainModule):
    """A classifier with dropout; parameters come from seed 3."""

    def __init__(self, optimizer: str = "sgd", dropout: float = 0.25) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def loader(batch: int = BATCH, window: int = 1) -> DataLoader[Any]:
    """An epoch of ten steps of ``4 * window`` samples."""
    generator = torch.Generator().manual_seed(9)
    samples = 10 * BATCH * window
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def bare(optimizer: str, window: int, dropout: float = 0.25, batch: int = BATCH) -> Tensor:
    """What a user would write in plain PyTorch."""
    model = Net(optimizer, dropout)
    steps = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(5)
    for _ in range(5):
        for i, (x, y) in enumerate(loader(batch, window)):
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / window).backward()
            if (i + 1) % window == 0:
                steps.step()
                steps.zero_grad()
    return flat(model)


def by_engine(optimizer: str, window: int, dropout: float = 0.25, batch: int = BATCH) -> Tensor:
    engine = Engine(accelerator="cpu", accumulate_grad_batches=window)
    model = Net(optimizer, dropout)
    model, steps, batches = engine.prepare(model, OPTIMIZERS[optimizer](model.parameters()), loader(batch, window))
    torch.manual_seed(5)
    for _ in range(5):
        for x, y in batches:
            with engine.accumulate(model):
                engine.backward(nn.functional.cross_entropy(model(x), y))
                steps.step()
                steps.zero_grad()
    return flat(engine.unwrap_model(model))


def by_fit(optimizer: str, window: int, dropout: float = 0.25, batch: int = BATCH, **settings: Any) -> Tensor:
    model = Net(optimizer, dropout)
    torch.manual_seed(5)
    result = Fit(accelerator="cpu", max_epochs=5, accumulate_grad_batches=window, **settings).run(
        model, loader(batch, window)
    )
    assert result.step == STEPS
    return flat(model)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_bit_identical(optimizer: str, window: int) -> None:
    expected = bare(optimizer, window)
    assert not torch.equal(expected, flat(Net(optimizer)))
    assert not torch.equal(expected, bare(optimizer, window, dropout=0.0))
    assert torch.equal(by_engine(optimizer, window), expected)
    assert torch.equal(by_fit(optimizer, window), expected)
    assert torch.equal(by_fit(optimizer, window, seed=5), expected)


def rank_two() -> Any:
    """Two ranks with half the micro-batch each."""
    found = {}
    for optimizer in OPTIMIZERS:
        for window in (1, 4):
            for name, function in (("engine", by_engine), ("fit", by_fit)):
                found[f"{name} {optimizer} {window}"] = function(optimizer, window, 0.0, BATCH // 2).tolist()
    return found


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize("door", ["engine", "fit"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_two_ranks_are_one(two: Any, optimizer: str, window: int, door: str) -> None:
    first, second = (torch.tensor(rank[f"{door} {optimizer} {window}"]) for rank in two["two"])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, bare(optimizer, window, dropout=0.0), rtol=1e-6, atol=1e-6)
