"""A loss scaler that several optimizers share."""

from __future__ import annotations

import pytest
import torch

from engine.step.scaler import Scaler

CPU = torch.device("cpu")


def optimizer(value: float = 1.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.tensor([value]))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


@pytest.mark.parametrize("divisor", [None, 4.0, torch.tensor(4.0), torch.tensor(4.0, dtype=torch.float64)])
def test_unscale_divides_by_scale_and_weight(divisor: torch.Tensor | float | None) -> None:
    scaler = Scaler(CPU)
    p, o = optimizer()
    (p * 3).sum().backward(scaler.seed(torch.tensor(1.0)))
    assert p.grad is not None
    assert p.grad.item() == 3 * 65536.0
    found = scaler.unscale(o, divisor)
    assert found.item() == 0.0
    assert p.grad.item() == (3.0 if divisor is None else 0.75)


def test_an_infinite_gradient_is_found_and_halves_the_scale() -> None:
    scaler = Scaler(CPU)
    p, o = optimizer()
    (p * float("inf")).sum().backward(scaler.seed(torch.tensor(1.0)))
    found = scaler.unscale(o, None)
    assert found.item() == 1.0
    scaler.stepped([o], found, [o])
    assert scaler.get_scale() == 32768.0


def test_the_scale_grows_after_the_interval() -> None:
    scaler = Scaler(CPU)
    scaler.set_growth_interval(2)
    p, o = optimizer()
    for expected in (65536.0, 131072.0):
        p.grad = None
        p.sum().backward(scaler.seed(torch.tensor(1.0)))
        scaler.stepped([o], scaler.unscale(o, None), [o])
        assert scaler.get_scale() == expected


def test_the_scale_waits_for_the_other_optimizers_gradients() -> None:
    scaler = Scaler(CPU)
    (p, a), (q, b) = optimizer(), optimizer()
    (p * float("inf")).sum().backward(scaler.seed(torch.tensor(1.0)))
    (q * 2).sum().backward(scaler.seed(torch.tensor(1.0)))
    scaler.stepped([a], scaler.unscale(a, None), [a, b])
    assert scaler.get_scale() == 65536.0  # b's gradients were made with it
    found = scaler.unscale(b, None)
    assert q.grad is not None
    assert q.grad.item() == 2.0
    scaler.stepped([b], found, [a, b])
    assert scaler.get_scale() == 32768.0  # the worst of both


def test_used_gradients_that_stay_around_do_not_hold_the_scale() -> None:
    scaler = Scaler(CPU)
    (p, a), (q, b) = optimizer(), optimizer()
    for parameter, o in ((q, b), (p, a)):  # b first: its used gradient is still there when a steps
        (parameter * float("inf")).sum().backward(scaler.seed(torch.tensor(1.0)))
        scaler.stepped([o], scaler.unscale(o, None), [a, b])
    assert scaler.get_scale() == 16384.0
