"""What micro-batches without a loss weigh."""

from __future__ import annotations

from typing import Any

import torch
from support.internals import new_share, new_window
from torch import Tensor

from engine import Loss
from engine.step import missing_loss


def weight(value: float = 2.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def backward(window: Any, loss: Any) -> None:
    root, divisor = window.weights.weigh(loss, 1, False)
    root.backward(window.weights.seed(divisor, root))


def finish(window: Any) -> Any:
    return window.weights.close(window.weights.states[0])


def test_micro_batches_without_loss_do_not_count() -> None:
    window, w = new_window(4), weight()
    window.position.accumulating = True
    for j in range(4):
        window.begin(new_share(1, 4.0, 1.0, last=j == 3))
        if j == 1:
            missing_loss.drop(window, 1, False)
        else:
            backward(window, w * 1.0)
    assert w.grad is not None
    assert w.grad.item() == 0.75
    assert finish(window) == 0.75


def test_a_window_of_dropped_micro_batches_is_empty() -> None:
    window = new_window(2)
    window.position.accumulating = True
    for last in (False, True):
        window.begin(new_share(1, 2.0, 1.0, last))
        missing_loss.drop(window, 1, False)
    assert not window.weights.fed
    assert finish(window) is None


def test_a_dropped_micro_batch_before_a_weighted_one() -> None:
    window, w = new_window(2), weight()
    window.position.accumulating = True
    window.begin(new_share(1, 2.0, 1.0, last=False))
    missing_loss.drop(window, 1, False)
    window.begin(new_share(1, 2.0, 1.0, last=True))
    backward(window, Loss(w * 6.0, 3))
    total = finish(window)
    assert w.grad is not None
    assert w.grad.item() / (1.0 if total is None else float(total)) == 2.0


def test_joins_reaches_every_trained_parameter() -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    missing_loss.zero_with_graph(model.parameters()).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.0, 0.0]]
    assert model.bias.grad is None
