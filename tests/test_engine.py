"""``Engine`` on one process: preparing, windows, clipping, stepping. Several processes: ``test_processes``, ``strategies/test_ddp``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import DDP, Engine, Loss
from engine.data.loader import PreparedLoader


def engine_of(**settings: Any) -> Engine:
    return Engine(**{"accelerator": "cpu", **settings})


def unit(engine: Engine, lr: float = 1.0) -> tuple[nn.Module, Any]:
    """``model(x) = w * x`` with ``w = 0``, and SGD."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return engine.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


# -- preparing --------------------------------------------------------------------------------------------------------------------


def test_prepare_keeps_order_and_leaves_the_unknown() -> None:
    engine, thing = engine_of(), object()
    model, plain = nn.Linear(1, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.zeros(2, 1)))
    out = engine.prepare(scheduler, thing, loader, plain, model, 3, optimizer, "text")
    assert isinstance(out, tuple)
    assert out[0].scheduler is scheduler
    assert out[1] is thing
    assert out[2].loader is loader
    assert out[3] is None
    assert out[4] is model
    assert out[5] == 3
    assert out[6].optimizer is optimizer
    assert out[7] == "text"
    assert engine.prepare(thing) is thing


def test_prepare_is_idempotent() -> None:
    engine = engine_of(precision="bf16-mixed")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    once = engine.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), DataLoader([1, 2]))
    twice = engine.prepare(*once)
    assert all(a is b for a, b in zip(once, twice, strict=True))
    assert len(model._forward_hooks) == 1
    assert engine.prepare(model) is model
    assert len(model._forward_hooks) == 1


def test_prepare_takes_any_number_of_each() -> None:
    engine = engine_of()
    models = [nn.Linear(1, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    out = engine.prepare(*models, *optimizers)
    assert [type(o).__name__ for o in out] == ["Linear"] * 3 + ["PreparedOptimizer"] * 3
    assert [o.optimizer for o in out[3:]] == optimizers


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16), ("64-true", torch.float64)]
)
def test_true_precisions_cast_parameters_and_batches(precision: str, dtype: torch.dtype) -> None:
    engine = engine_of(precision=precision)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.ones(2, 1), torch.tensor([0, 1])))
    )
    for x, y in loader:
        assert (x.dtype, y.dtype) == (dtype, torch.int64)
        engine.backward(model(x).square().mean())
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_an_optimizer_over_nothing_is_an_error() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"SGD has no parameters: give it model.parameters\(\)"):
        engine_of().prepare(optimizer)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp7"}, "precision='fp7' is unknown"),
        ({"strategy": "ddpp"}, "strategy='ddpp' is unknown; did you mean 'ddp'"),
        ({"accelerator": "gpuu"}, "accelerator='gpuu' is unknown; did you mean 'gpu'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' is unknown; possible: 'raise' or 'skip', or None"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0 must be an int of at least 1"),
        (
            {"accumulate_grad_batches": {0: 1, 5: 2}},
            "For a schedule, set engine.accumulate_grad_batches in your loop before each pass",
        ),
        ({"accumulate_grad_batches": True}, "accumulate_grad_batches=True must be"),
        ({"accumulate_grad_batches": 2.0}, "accumulate_grad_batches=2.0 must be"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(**settings)


def test_unwrap_and_free() -> None:
    engine = engine_of(strategy=DDP())
    model, optimizer = nn.Linear(1, 1), None
    prepared = engine.prepare(model)
    assert engine.unwrap_model(prepared) is model
    prepared, optimizer = engine.free_memory(prepared, optimizer)
    assert prepared is None
    assert optimizer is None


def test_unwrap_looks_through_torch_compile() -> None:
    engine, model, compiled = engine_of(), nn.Linear(1, 1), nn.Module()
    compiled._orig_mod = model  # as torch.compile names it; compiling itself would import for seconds
    assert engine.unwrap_model(compiled) is model


# -- windows ----------------------------------------------------------------------------------------------------------------------


def test_six_unit_micro_batches_by_four() -> None:
    engine = engine_of(accumulate_grad_batches=4)
    model, optimizer = unit(engine)
    loader = engine.prepare_data_loader([torch.ones(2, 1) for _ in range(6)])
    weights, synced = [], []
    for x in loader:
        with engine.accumulate(model):
            engine.backward(model(x).mean())
            synced.append(engine.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0.0, 0.0, 0.0, -1.0, -1.0, -2.0]
    assert synced == [False, False, False, True, False, True]


def test_without_a_prepared_loader_calls_are_counted() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    weights = []
    for i in range(5):
        with engine.accumulate(model):
            engine.backward(model(torch.full((1, 1), float(i))).mean())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0.0, -0.5, -0.5, -3.0, -3.0]


def test_sync_gradients_can_be_read_after_the_block() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    found = [engine.sync_gradients]
    for _ in range(3):
        with engine.accumulate(model):
            engine.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(engine.sync_gradients)
    assert found == [True, False, True, False]
    engine.backward(model(torch.ones(1, 1)).mean())  # a plain step: it weighs 1, and steps
    assert engine.sync_gradients
    assert model.weight.grad.item() == 1.5


def test_without_accumulate_every_micro_batch_steps() -> None:
    engine = engine_of(accumulate_grad_batches=4)
    model, optimizer = unit(engine)
    for x in engine.prepare_data_loader([torch.ones(2, 1), torch.ones(1, 1)]):
        assert engine.sync_gradients
        engine.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -2.0


def test_the_window_may_change_between_epochs() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    loader = engine.prepare_data_loader([torch.ones(1, 1) for _ in range(4)])
    steps = []
    for size in (2, 4, 1):
        engine.accumulate_grad_batches = size
        before = model.weight.item()
        for x in loader:
            with engine.accumulate(model):
                engine.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        steps.append(before - model.weight.item())
    assert steps == [2.0, 1.0, 4.0]


def test_evaluation_inside_a_window_changes_nothing() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    held_out = engine.prepare_data_loader([torch.ones(5, 1), torch.ones(2, 1)])
    for x in engine.prepare_data_loader([torch.full((2, 1), 2.0), torch.full((2, 1), 4.0)]):
        with engine.accumulate(model):
            engine.backward(model(x).mean())
            share = engine.window.share
            with torch.no_grad():
                assert sum(len(y) for y in held_out) == 7
            assert engine.window.share is share
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -3.0


def test_schedulers_step_once_a_window() -> None:
    engine = engine_of(accumulate_grad_batches=3)
    model = nn.Linear(1, 1, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.prepare(model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5))
    for x in engine.prepare_data_loader([torch.ones(1, 1) for _ in range(7)]):
        with engine.accumulate(model):
            engine.backward(model(x).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.125]  # 7 micro-batches are 3 windows


# -- a step -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_clipping_sees_the_true_gradient(precision: str) -> None:
    engine = engine_of(accumulate_grad_batches=2, precision=precision)
    model, optimizer = unit(engine)
    norms = []
    for x, count in ((torch.full((4, 1), 0.5), 2), (torch.full((4, 1), 1.0), 6)):
        with engine.accumulate(model):
            engine.backward(Loss(model(x).sum() / 2, count))  # gradients 1 and 2
            norms.append(engine.clip_grad_norm_(model.parameters(), 0.125))
            optimizer.step()
            optimizer.zero_grad()
    assert norms[0] is None
    assert norms[1].item() == pytest.approx(0.375)
    assert model.weight.item() == pytest.approx(-0.125, rel=1e-5)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (-1.0, "=-1.0) turns the gradients round"),
        (float("nan"), "=nan) makes the gradients NaN"),
        (
            0,
            "=0) sets every gradient to 0, so that nothing is trained: give a number above 0. To train without clipping, leave",
        ),
        (torch.tensor(-2.0), "turns the gradients round"),
        (None, "=None) must be a number above 0"),
    ],
)
def test_limits_that_ruin_gradients_are_refused(limit: Any, words: str) -> None:
    engine = Engine(accelerator="cpu", accumulate_grad_batches=2)
    model, optimizer = engine.prepare(plain := nn.Linear(2, 1), torch.optim.SGD(plain.parameters(), lr=1.0))
    calls: list[Callable[[], Any]] = [
        lambda: engine.clip_grad_norm_(model.parameters(), limit),
        lambda: engine.clip_grad_value_(model.parameters(), limit),
    ]
    if limit is not None:
        calls += [lambda: engine.step([optimizer], max_norm=limit), lambda: engine.step([optimizer], max_value=limit)]
        calls += [lambda: engine.finish_gradients([optimizer], max_norm=limit)]
    with engine.accumulate(model):  # not the window's last micro-batch
        engine.backward(model(torch.ones(1, 2)).mean())
        for call in calls:
            with pytest.raises((ValueError, TypeError), match=re.escape(words)):
                call()
        engine.clip_grad_norm_(model.parameters(), float("inf"))


def test_value_clipping_takes_a_single_tensor() -> None:
    engine = engine_of()
    model, optimizer = unit(engine)
    engine.backward(model(torch.full((1, 1), 3.0)).mean())
    engine.clip_grad_value_(model.weight, 0.5)
    optimizer.step()
    assert model.weight.item() == -0.5


def test_engine_step_applies_several_optimizers_as_one() -> None:
    engine = engine_of()
    (a, first), (b, second) = unit(engine), unit(engine)
    engine.backward((a(torch.full((1, 1), 3.0)) + b(torch.full((1, 1), 4.0))).mean())
    engine.step([first, second.optimizer], max_norm=1.0)
    assert [a.weight.item(), b.weight.item()] == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert engine.grad_norm is not None
    assert engine.grad_norm.item() == 5.0
    assert engine.pending_steps == 0


def test_a_gan_shares_the_scaler() -> None:
    engine = engine_of(precision="16-mixed")
    assert engine.scaler is not None
    (a, first), (b, second) = unit(engine), unit(engine)
    for i in range(4):
        engine.backward(a(torch.full((2, 1), float("inf") if i == 1 else 0.5)).mean())
        engine.backward(b(torch.full((2, 1), 0.25)).mean())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert a.weight.item() == -1.5  # of four steps one was skipped
    assert b.weight.item() == -1.0
    assert engine.scaler.get_scale() == 32768.0


def test_a_skipped_step_leaves_the_scheduler() -> None:
    engine = engine_of(precision="16-mixed")
    model = nn.Linear(1, 1, bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.prepare(model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5))
    lrs, skipped = [], []
    for value in (0.5, float("inf"), 0.5):
        engine.backward(model(torch.full((2, 1), value)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        lrs.append(plain.param_groups[0]["lr"])
        skipped.append((optimizer.step_was_skipped, engine.optimizer_step_was_skipped))
    assert lrs == [0.5, 0.5, 0.25]
    assert skipped == [(False, False), (True, True), (False, False)]


def test_nonfinite_gradients_name_their_parameter() -> None:
    engine = engine_of(on_nonfinite="raise")
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    engine.backward(model(torch.full((1, 1), float("nan"))).mean())
    with pytest.raises(FloatingPointError, match=r"first in: 0.weight, 1.weight;"):
        optimizer.step()


def test_backward_takes_torchs_arguments() -> None:
    engine = engine_of()
    model, _ = unit(engine)
    loss = model(torch.full((1, 1), 3.0)).mean()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    assert model.weight.grad.item() == 6.0
    other = nn.Linear(1, 1, bias=False)
    engine.backward((model(torch.ones(1, 1)) + other(torch.ones(1, 1))).mean(), inputs=[other.weight])
    assert model.weight.grad.item() == 6.0
    assert other.weight.grad is not None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_a_pass_that_creates_a_graph_can_be_differentiated() -> None:
    """The loss is x**3 / 2, of two micro-batches: the gradient of both is 3 x**2 / 2 * 2, its derivative 6 x."""
    engine = Engine(accelerator="cpu", accumulate_grad_batches=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        with engine.accumulate(prepared):
            engine.backward(prepared(torch.ones(1, 1)).pow(3).mean(), create_graph=True)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(12.0)
    (second,) = torch.autograd.grad(model.weight.grad.sum(), [model.weight])
    assert second.item() == pytest.approx(12.0)
    optimizer.zero_grad()
    with (
        engine.accumulate(prepared),
        pytest.raises(RuntimeError, match="several micro-batches divides the gradients of Loss"),
    ):
        engine.backward(Loss(prepared(torch.ones(1, 1)).sum(), 1), create_graph=True)
    half = Engine(accelerator="cpu", precision="16-mixed")
    model = half.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="divided by the loss scale at the step"):
        half.backward(model(torch.ones(1, 1)).sum(), create_graph=True)


def test_no_sync_is_neutral_alone() -> None:
    engine = engine_of()
    model, _ = unit(engine)
    with engine.no_sync(model):
        engine.backward(model(torch.ones(1, 1)).mean())
    assert model.weight.grad.item() == 1.0


# -- several engines --------------------------------------------------------------------------------------------------------------


def test_two_engines_side_by_side() -> None:
    plain, half = (
        engine_of(accumulate_grad_batches=2, seed=1),
        engine_of(precision="16-mixed", on_nonfinite="skip", seed=2),
    )
    (a, first), (b, second) = unit(plain), unit(half)
    seen: list[Tensor] = []
    b.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    data = TensorDataset(torch.arange(16.0).view(16, 1) / 16)
    loaders = [e.prepare(DataLoader(data, batch_size=4, shuffle=True)) for e in (plain, half)]
    orders: list[list[Tensor]] = [[], []]
    for (x,), (y,) in zip(*loaders, strict=True):
        orders[0].append(x)
        orders[1].append(y)
        with plain.accumulate(a):
            plain.backward(a(torch.ones(2, 1)).mean())
            half.backward(b(torch.full((2, 1), 0.5)).mean())
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    assert a.weight.item() == -2.0  # four micro-batches, two windows
    assert b.weight.item() == -2.0  # four steps of 0.5
    assert plain.scaler is None
    assert plain.precision.name == "32-true"
    assert not torch.equal(torch.cat(orders[0]), torch.cat(orders[1]))
    assert torch.equal(torch.cat(orders[0]).sort(0).values, torch.cat(orders[1]).sort(0).values)


def generated() -> Iterator[Tensor]:
    yield from (torch.ones(1, 1) for _ in range(3))


def test_any_iterable_can_be_a_loader() -> None:
    engine = engine_of()
    loader = engine.prepare_data_loader(generated())
    assert isinstance(loader, PreparedLoader)
    assert loader.length is None
    assert len(list(loader)) == 3
