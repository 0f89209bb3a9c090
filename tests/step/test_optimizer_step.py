"""The optimizer step: division, clipping, the verdict on non-finite gradients, and its callbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.internals import new_share, new_window
from torch.optim import SGD

from engine.step.gradients import Loss
from engine.step.optimizer_step import Stepper
from engine.step.scaler import Scaler
from engine.strategies import Single

INF = float("inf")


class Alone:
    world_size, rank = 1, 0


class Bench:
    """One parameter at 0 and SGD with lr 1: after a step it is minus the applied gradient."""

    def __init__(
        self,
        *,
        scaled: bool = False,
        on_nonfinite: str | None = None,
        size: int = 1,
        values: int = 1,
        momentum: float = 0.0,
    ) -> None:
        self.window = new_window(size)
        strategy = Single()
        strategy.connect(Alone())  # type: ignore[arg-type]
        self.scaler = Scaler(torch.device("cpu")) if scaled else None
        self.stepper = Stepper(self.window, strategy, self.scaler, on_nonfinite)
        self.p, self.optimizer = self.more(values, momentum)

    def more(self, values: int = 1, momentum: float = 0.0) -> tuple[torch.nn.Parameter, SGD]:
        parameter = torch.nn.Parameter(torch.zeros(values))
        optimizer = SGD([parameter], lr=1.0, momentum=momentum)
        self.stepper.add(optimizer)
        return parameter, optimizer

    def backward(self, *gradient: float, count: float | None = None, on: torch.nn.Parameter | None = None) -> None:
        total = ((self.p if on is None else on) * torch.tensor(gradient)).sum()
        root, divisor = self.window.weights.weigh(
            total if count is None else Loss(total, count), 1, self.scaler is not None
        )
        seed = self.window.weights.seed(divisor, root)
        root.backward(seed if self.scaler is None else self.scaler.seed(seed))

    def micro(self, *gradient: float, count: float, last: bool) -> None:
        self.window.position.accumulating = True
        self.window.begin(new_share(1, float(self.window.position.size), 1.0, last))
        self.backward(*gradient, count=count)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({}, [-6.0, -8.0]),
        ({"max_norm": 5.0}, [-3.0, -4.0]),
        ({"max_norm": 50.0}, [-6.0, -8.0]),
        ({"max_value": 7.0}, [-6.0, -7.0]),
    ],
)
def test_division_comes_before_clipping(scaled: bool, clip: dict[str, float], expected: list[float]) -> None:
    bench = Bench(scaled=scaled, size=2, values=2)
    bench.micro(12.0, 0.0, count=1, last=False)
    bench.micro(6.0, 24.0, count=2, last=True)
    bench.stepper.step([bench.optimizer], **clip)  # the gradient is [18, 24] / 3, of norm 10
    assert bench.p.tolist() == pytest.approx(expected, rel=1e-6)
    if "max_norm" in clip:
        assert bench.stepper.norm is not None
        assert bench.stepper.norm.item() == pytest.approx(10.0)


def test_the_norm_is_over_all_optimizers() -> None:
    bench = Bench()
    q, other = bench.more()
    bench.backward(3.0)
    bench.backward(4.0, on=q)
    bench.stepper.step([bench.optimizer, other], max_norm=1.0)
    assert [bench.p.item(), q.item()] == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_without_clip_or_check_there_is_no_norm() -> None:
    bench = Bench()
    bench.backward(2.0)
    bench.stepper.step([bench.optimizer])
    assert bench.stepper.norm is None
    assert bench.p.item() == -2.0


@pytest.mark.parametrize(("scaled", "on_nonfinite"), [(True, None), (True, "raise"), (False, "skip")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_nonfinite_step_is_skipped(scaled: bool, on_nonfinite: str | None, max_norm: float | None) -> None:
    bench, told = Bench(scaled=scaled, on_nonfinite=on_nonfinite, momentum=0.9), []
    bench.backward(INF)
    bench.stepper.step([bench.optimizer], max_norm=max_norm, then=told.append)
    assert bench.p.item() == 0.0
    assert not bench.optimizer.state
    assert bench.stepper.skipped
    bench.optimizer.zero_grad()
    bench.backward(0.5)
    bench.stepper.step([bench.optimizer], max_norm=max_norm, then=told.append)
    assert bench.p.item() == -0.5
    assert not bench.stepper.skipped
    assert told == [False, True]


def test_steps_in_a_row_count_for_each_optimizer() -> None:
    """One whose every step is skipped is found beside another whose steps are applied."""
    bench = Bench(on_nonfinite="skip")
    bench.stepper.skips.limit = 3
    q, other = bench.more()

    def both() -> None:
        for optimizer, parameter, gradient in ((bench.optimizer, bench.p, INF), (other, q, 1.0)):
            optimizer.zero_grad()
            bench.backward(gradient, on=parameter)
            bench.stepper.step([optimizer])

    both()
    both()
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row were skipped"):
        both()
    assert (bench.p.item(), q.item()) == (0.0, -2.0)


def test_skipped_steps_have_no_limit_if_none_is_wanted() -> None:
    bench = Bench(on_nonfinite="skip")
    bench.stepper.skips.limit = None
    for _ in range(300):
        bench.optimizer.zero_grad()
        bench.backward(INF)
        bench.stepper.step([bench.optimizer])
    assert bench.stepper.skips.count == 300


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_raise_names_the_gradient_and_keeps_the_parameters(bad: float) -> None:
    bench = Bench(on_nonfinite="raise")
    bench.window.models = [torch.nn.ModuleDict({"head": torch.nn.ParameterDict({"weight": bench.p})})]
    bench.backward(bad)
    with pytest.raises(
        FloatingPointError, match=r"not finite \(on_nonfinite='raise'\); first in: head.weight; .*on_nonfinite='skip'"
    ):
        bench.stepper.step([bench.optimizer])
    assert bench.p.item() == 0.0


def test_unchecked_nonfinite_gradients_are_applied() -> None:
    bench = Bench()
    bench.backward(INF)
    bench.stepper.step([bench.optimizer])
    assert bench.p.item() == -INF


def test_one_bad_optimizer_holds_all_that_step_together() -> None:
    bench = Bench(scaled=True)
    q, other = bench.more()
    bench.backward(INF)
    bench.backward(1.0, on=q)
    bench.stepper.step([bench.optimizer, other])
    assert [bench.p.item(), q.item()] == [0.0, 0.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_prepared_gradients_are_readable_and_used_once(scaled: bool) -> None:
    bench = Bench(scaled=scaled, size=2)
    bench.micro(2.0, count=1, last=False)
    bench.micro(4.0, count=2, last=True)
    for _ in range(2):
        bench.stepper.early.prepare([bench.optimizer])
        assert bench.p.grad is not None
        assert bench.p.grad.item() == pytest.approx(2.0)  # (2 + 4) / 3
    bench.stepper.step([bench.optimizer])
    assert bench.p.item() == pytest.approx(-2.0)


def test_several_optimizers_share_a_scaler() -> None:
    bench = Bench(scaled=True)
    assert bench.scaler is not None
    q, other = bench.more()
    bench.backward(INF)
    bench.backward(3.0, on=q)
    bench.stepper.step([bench.optimizer])
    assert bench.scaler.get_scale() == 65536.0
    bench.stepper.step([other])
    assert [bench.p.item(), q.item()] == [0.0, -3.0]
    assert bench.scaler.get_scale() == 32768.0


def test_after_gets_the_newest_verdict() -> None:
    bench, told = Bench(scaled=True), []
    for gradient in (INF, 1.0):
        bench.optimizer.zero_grad()
        bench.backward(gradient)
        bench.stepper.step([bench.optimizer])
        bench.stepper.after(told.append)
    assert told == [False, True]
    assert bench.stepper.pending == 0


class Fused(SGD):
    """Stands for a fused optimizer: it divides by ``grad_scale`` in its own kernel."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.found_inf.item() == 0.0  # type: ignore[attr-defined]
        for p in self.param_groups[0]["params"]:
            p.data -= p.grad / self.grad_scale  # type: ignore[attr-defined]


def test_a_fused_optimizer_divides_itself() -> None:
    bench = Bench(size=2)
    optimizer = Fused([bench.p], lr=1.0)
    bench.micro(2.0, count=torch.tensor(1), last=False)  # type: ignore[arg-type]
    bench.micro(4.0, count=torch.tensor(2), last=True)  # type: ignore[arg-type]
    bench.stepper.step([optimizer])
    assert bench.p.item() == -2.0
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_torchs_fused_sgd_divides_as_the_plain_one() -> None:
    weights = []
    for fused in (False, True):
        bench = Bench(size=2, values=2)
        optimizer = torch.optim.SGD([bench.p], lr=0.1, fused=fused)
        for _ in range(3):
            bench.micro(2.0, 1.0, count=torch.tensor(1.0), last=False)  # type: ignore[arg-type]
            bench.micro(4.0, 2.0, count=torch.tensor(2.0), last=True)  # type: ignore[arg-type]
            bench.stepper.step([optimizer])
            optimizer.zero_grad()
        weights.append(bench.p.detach())
    torch.testing.assert_close(weights[0], torch.tensor([-0.6, -0.3]))
    torch.testing.assert_close(weights[1], weights[0])


class Above:
    """Leaves out steps whose gradient norm is above 3, or not finite."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.count = 0

    def check(self, norm: torch.Tensor) -> torch.Tensor:
        self.norms.append(norm.item())
        return (~(norm <= 3.0)).float()

    def left_out(self) -> None:
        self.count += 1


@pytest.mark.parametrize("scaled", [False, True])
def test_a_guard_leaves_out_steps(scaled: bool) -> None:
    bench, guard, verdicts = Bench(scaled=scaled), Above(), []
    bench.stepper.guard_by(guard)
    for gradient in (1.0, 4.0, 2.0):
        bench.backward(gradient)
        bench.stepper.step([bench.optimizer], max_norm=0.5, then=verdicts.append)
        bench.optimizer.zero_grad()
    assert verdicts == [True, False, True]
    assert guard.norms == [1.0, 4.0, 2.0]  # before clipping
    assert guard.count == 1
    assert bench.p.item() == pytest.approx(-1.0, rel=1e-5)  # two steps of 0.5
    if bench.scaler is not None:
        assert bench.scaler.state_dict()["scale"] == 65536.0  # a guarded step is no overflow
    with pytest.raises(ValueError, match="Above decides already"):
        bench.stepper.guard_by(Above())
    bench.stepper.guard_by(None)
    bench.backward(4.0)
    bench.stepper.step([bench.optimizer])
    assert bench.p.item() == pytest.approx(-5.0, rel=1e-5)


@pytest.mark.parametrize(("on_nonfinite", "counted"), [(None, 1), ("skip", 0)])
def test_a_guard_and_gradients_that_are_not_finite(on_nonfinite: str | None, counted: int) -> None:
    bench, guard = Bench(on_nonfinite=on_nonfinite), Above()
    bench.stepper.guard_by(guard)
    bench.backward(INF)
    bench.stepper.step([bench.optimizer])
    assert bench.p.item() == 0.0
    assert bench.stepper.skipped
    assert guard.count == counted


def test_a_finite_step_that_a_guard_leaves_out_is_no_error() -> None:
    bench, guard = Bench(on_nonfinite="raise"), Above()
    bench.stepper.guard_by(guard)
    bench.backward(4.0)
    bench.stepper.step([bench.optimizer])
    assert (bench.p.item(), guard.count) == (0.0, 1)
    bench.optimizer.zero_grad()
    bench.backward(INF)
    with pytest.raises(FloatingPointError, match="not finite"):
        bench.stepper.step([bench.optimizer])


def test_each_parameter_is_clipped_by_its_own_norm() -> None:
    """Gradients (3, 4) / 2, 0.3 and none: after the division by the count their norms are 2.5, 0.15 and 0, the limit is 0.5."""
    bench = Bench(values=2)
    small, absent = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    bench.optimizer.add_param_group({"params": [absent]})
    bench.optimizer.add_param_group({"params": [small]})
    total = (bench.p * torch.tensor([3.0, 4.0])).sum() + 0.3 * small.sum()
    bench.window.position.accumulating = True
    bench.window.begin(new_share(1, 2.0, 1.0, True))
    root, divisor = bench.window.weights.weigh(Loss(total, 2.0), 2, False)
    root.backward(bench.window.weights.seed(divisor, root))
    bench.stepper.step([bench.optimizer], max_parameter_norm=0.5)
    assert bench.p.tolist() == pytest.approx([-0.3, -0.4], rel=1e-5)
    assert small.tolist() == pytest.approx([-0.15], rel=1e-5)
    assert absent.tolist() == [0.0]
    assert bench.stepper.norm is not None
    assert float(bench.stepper.norm) == pytest.approx((2.5**2 + 0.15**2) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_clipped_by_parameter_is_skipped_if_a_gradient_is_not_finite(scaled: bool) -> None:
    bench = Bench(values=2, scaled=scaled, on_nonfinite=None if scaled else "skip")
    applied: list[bool] = []
    for gradient in (INF, 3.0):
        bench.backward(gradient, 0.0)
        bench.stepper.step([bench.optimizer], max_parameter_norm=0.5, then=applied.append)
        bench.optimizer.zero_grad()
    assert applied == [False, True]
    assert bench.p.tolist() == pytest.approx([-0.5, 0.0], rel=1e-5)
