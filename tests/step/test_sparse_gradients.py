"""Sparse gradients (``nn.Embedding(sparse=True)``) are clipped, checked and divided as dense ones are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, Loss

# Rows occur several times in a batch and in a window: their parts must be added up before they are clipped.
BATCHES = [
    torch.tensor(rows)
    for rows in ([[0, 1], [1, 1], [2, 0]], [[3, 1], [1, 2], [4, 4]], [[0, 0], [0, 0], [5, 1]], [[2, 2], [1, 0], [0, 3]])
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x).mean(1))
        return out


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def dense(window: int, norm: float | None, value: float | None) -> Tensor:
    """A bare float64 loop over whole windows, with the table's gradient made dense."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, len(BATCHES), window):
        model(torch.cat(BATCHES[start : start + window])).square().mean().backward()
        model.table.weight.grad = model.table.weight.grad.to_dense()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        if value:
            nn.utils.clip_grad_value_(model.parameters(), value)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("norm", "value"), [(None, None), (0.05, None), (None, 0.01)])
@pytest.mark.parametrize("on_nonfinite", [None, "raise"])
@pytest.mark.parametrize("counted", [False, True])
def test_as_dense_ones(window: int, norm: float | None, value: float | None, on_nonfinite: Any, counted: bool) -> None:
    engine = Engine(accelerator="cpu", accumulate_grad_batches=window, on_nonfinite=on_nonfinite)
    model = Net()
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in BATCHES:
        with engine.accumulate(model):
            squares = model(batch).square()
            engine.backward(Loss(squares.sum(), squares.numel()) if counted else squares.mean())
            if norm:
                engine.clip_grad_norm_(model.parameters(), norm)
            if value:
                engine.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            optimizer.zero_grad()
    assert (flat(model) - dense(window, norm, value)).abs().max() < 1e-6
    assert model.table.weight.grad is None


def test_a_row_that_is_not_finite_is_found() -> None:
    engine = Engine(accelerator="cpu", on_nonfinite="raise")
    model = Net()
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    engine.backward(model(BATCHES[0]).sum() * float("inf"))
    with pytest.raises(FloatingPointError, match=r"first in: table\.weight"):
        optimizer.step()
