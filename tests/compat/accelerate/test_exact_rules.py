"""By default the engine's promises hold for a script of Accelerate's: N processes equal one, each sample counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader, TensorDataset

from engine.interop.accelerate import Accelerator
from engine.interop.accelerate.utils import DataLoaderConfiguration, set_seed

X = torch.randn(22, 3, generator=torch.Generator().manual_seed(0))


def train(accelerator: Accelerator, batch_size: int) -> dict[str, list[float]]:
    set_seed(3)
    model: Any = torch.nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen, ends = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(x[:, 0]).tolist()
            ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == ([False] * (len(loader) - 1) + [True]) * 2
    weights = [v for p in accelerator.unwrap_model(model).parameters() for v in p.flatten().tolist()]
    return {"weights": weights, "seen": seen, "rate": schedule.get_last_lr()}


def bare() -> list[float]:
    """The whole global batches of 8 samples, in the order that the engine gives."""
    order = train(Accelerator(cpu=True), 8)["seen"]
    index = {x[0].item(): i for i, x in enumerate(X)}
    set_seed(3)
    model = torch.nn.Linear(3, 1)
    for epoch in (order[:22], order[22:]):
        for start in range(0, 22, 8):
            x = X[[index[value] for value in epoch[start : start + 8]]]
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            rate = 0.1 * 0.5 ** ((start // 8 + 3 * (epoch is not order[:22] and epoch == order[22:])) // 2)
            with torch.no_grad():
                for p in model.parameters():
                    p -= rate * p.grad
    return [v for p in model.parameters() for v in p.flatten().tolist()]


def rank_plain() -> dict[str, list[float]]:
    return train(Accelerator(cpu=True), 4)


def rank_split() -> dict[str, list[float]]:
    return train(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)), 8)


def rank_accumulated() -> dict[str, list[float]]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=2), 2)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_one_process_equals_a_bare_loop() -> None:
    torch.testing.assert_close(train(Accelerator(cpu=True), 8)["weights"], bare())


@pytest.mark.parametrize("name", ["plain", "split", "accumulated"])
def test_two_processes_equal_one(two: dict[str, list[Any]], name: str) -> None:
    expected = train(Accelerator(cpu=True), 8)
    for found in two[name]:
        torch.testing.assert_close(found["weights"], expected["weights"])
        assert found["rate"] == expected["rate"]
        assert sorted(found["seen"][:22]) == sorted(x[0].item() for x in X)


def test_what_only_the_other_rules_do_is_refused() -> None:
    with pytest.raises(ValueError, match="rules='accelerate'"):
        Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).prepare(DataLoader(X))
    with pytest.raises(ValueError, match="rules='Accelerate' is unknown"):
        Accelerator(cpu=True, rules="Accelerate")
