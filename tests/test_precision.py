"""Number formats by name, and a loss scaler that several optimizers share."""

from __future__ import annotations

import pickle

import pytest
import torch

from engine.precision import Precision, Scaler

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected", "autocast", "parameters", "scaled"),
    [
        ("32-true", "32-true", None, None, False),
        ("bf16-mixed", "bf16-mixed", torch.bfloat16, None, False),
        ("16-mixed", "16-mixed", torch.float16, None, True),
        ("bf16-true", "bf16-true", None, torch.bfloat16, False),
        ("16-true", "16-true", None, torch.float16, False),
        ("64-true", "64-true", None, torch.float64, False),
        ("no", "32-true", None, None, False),
        ("bf16", "bf16-mixed", torch.bfloat16, None, False),
        ("fp16", "16-mixed", torch.float16, None, True),
        (16, "16-mixed", torch.float16, None, True),
        (32, "32-true", None, None, False),
        (64, "64-true", None, torch.float64, False),
    ],
)
def test_names(name: str | int, expected: str, autocast: torch.dtype | None, parameters: torch.dtype | None, scaled: bool) -> None:
    found = Precision.parse(name)
    assert (found.name, found.autocast, found.parameters, found.scaled) == (expected, autocast, parameters, scaled)
    assert Precision.parse(found) is found
    assert pickle.loads(pickle.dumps(found)) == found


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"precision='fp7' is unknown; did you mean 'fp8'.*possible: 32-true, bf16-mixed, 16-mixed.*fp16"):
        Precision.parse("fp7")


@pytest.mark.parametrize(("name", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_context(name: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(2, 2)
    with Precision.parse(name).context(CPU):
        assert layer(torch.ones(1, 2)).dtype == dtype


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
