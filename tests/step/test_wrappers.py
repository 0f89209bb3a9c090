"""Prepared objects keep the interface of what they wrap."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import Engine
from engine.step.wrappers import PreparedOptimizer, PreparedScheduler


def bare_lbfgs(steps: int) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)], model.weight.detach()


@pytest.mark.parametrize("accumulate", [False, True])
def test_lbfgs(accumulate: bool) -> None:
    expected, weight = bare_lbfgs(3)
    torch.manual_seed(0)
    engine = Engine(accelerator="cpu")
    model = nn.Linear(3, 1)
    model, optimizer = engine.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5))
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        engine.backward(loss)
        return loss

    losses = []
    for _ in range(3):
        if accumulate:
            with engine.accumulate(model):
                losses.append(optimizer.step(closure).item())
        else:
            losses.append(optimizer.step(closure).item())
    assert losses == expected
    assert torch.equal(model.weight, weight)
    assert losses[-1] < losses[0]


def test_a_closure_is_refused_under_fp16() -> None:
    engine = Engine(accelerator="cpu", precision="16-mixed")
    model = nn.Linear(1, 1)
    optimizer = engine.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"closure.*16-mixed.*use bf16-mixed"):
        optimizer.step(lambda: torch.tensor(1.0))


def made() -> tuple[Engine, nn.Module, Any, Any]:
    torch.manual_seed(0)
    engine = Engine(accelerator="cpu")
    model = nn.Linear(2, 1)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    model, optimizer, scheduler = engine.prepare(model, plain, scheduler)
    return engine, model, optimizer, scheduler


def one_step(engine: Engine, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    engine.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def test_the_optimizers_interface() -> None:
    engine, model, optimizer, scheduler = made()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, PreparedOptimizer)
    plain = optimizer.optimizer
    one_step(engine, model, optimizer, scheduler)
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    assert optimizer.defaults is plain.defaults
    assert repr(optimizer) == repr(plain)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    plain.extra = "own"
    assert optimizer.extra == "own"
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        optimizer.nothing_of_the_sort  # noqa: B018
    one_step(engine, model, optimizer, scheduler)
    assert seen == ["post"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(plain.param_groups) == 2


def test_state_goes_in_and_out() -> None:
    engine, model, optimizer, scheduler = made()
    one_step(engine, model, optimizer, scheduler)
    _, _, other, other_scheduler = made()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_scheduler.load_state_dict(scheduler.state_dict())
    assert (
        other.optimizer.state_dict()["state"][0]["exp_avg"].tolist()
        == optimizer.state_dict()["state"][0]["exp_avg"].tolist()
    )
    assert other_scheduler.get_last_lr() == [0.05]
    assert scheduler.last_epoch == 1


def test_a_scheduler_may_be_made_on_the_prepared_optimizer() -> None:
    engine = Engine(accelerator="cpu")
    model = nn.Linear(2, 1)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = engine.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2))
    assert optimizer.param_groups[0]["lr"] == 0.5
    one_step(engine, model, optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.75


class Numbered:
    """A scheduler of another library: it is given the epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.epochs = optimizer, [0]

    def step(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.optimizer.param_groups[0]["lr"] = 1.0 / (1 + epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def test_a_scheduler_of_another_library_is_prepared_and_saved(tmp_path: Path) -> None:
    def prepared() -> Any:
        engine = Engine(accelerator="cpu")
        model = nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        return engine, *engine.prepare(model, plain, Numbered(plain))

    engine, model, optimizer, scheduler = prepared()
    assert isinstance(scheduler, PreparedScheduler)
    for epoch in (1, 2):
        engine.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step(epoch)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3)
    engine.save_state(tmp_path / "state")
    engine, _, _, other = prepared()
    engine.load_state(tmp_path / "state")
    assert other.epochs == [0, 1, 2]


def test_plateau_takes_its_metric() -> None:
    engine = Engine(accelerator="cpu")
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.prepare(
        model, plain, torch.optim.lr_scheduler.ReduceLROnPlateau(plain, patience=0)
    )
    assert isinstance(scheduler, PreparedScheduler)
    for _ in range(2):
        engine.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step(1.0)
    assert plain.param_groups[0]["lr"] == pytest.approx(0.1)


def test_pickles_are_the_plain_objects() -> None:
    engine, model, optimizer, scheduler = made()
    loader = engine.prepare(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
    one_step(engine, model, optimizer, scheduler)
    for prepared, kind in (
        (optimizer, torch.optim.AdamW),
        (scheduler, torch.optim.lr_scheduler.StepLR),
        (loader, DataLoader),
    ):
        for copied in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
            assert type(copied) is kind
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.state_dict()["state"][0]["exp_avg"].tolist() == optimizer.state_dict()["state"][0]["exp_avg"].tolist()
    assert [batch[0].tolist() for batch in pickle.loads(pickle.dumps(loader))] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_prepared_model_pickles(precision: str) -> None:
    engine = Engine(accelerator="cpu", precision=precision)
    model = engine.prepare(nn.Linear(2, 1))
    other = pickle.loads(pickle.dumps(model))
    x = torch.ones(1, 2)
    assert torch.equal(other(x), model(x))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))
    assert list(model.state_dict()) == ["weight", "bias"]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, fail: bool = False) -> Any:
        out = self.layer(x)
        self.seen.append(out.dtype)
        if fail:
            raise KeyError("inside")
        return {"out": out, "index": torch.arange(2), "list": [out, "text"]}


@pytest.mark.parametrize(
    ("precision", "inside"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16), ("32-true", torch.float32)]
)
def test_mixed_precision_computes_low_and_gives_fp32(precision: str, inside: torch.dtype) -> None:
    engine = Engine(accelerator="cpu", precision=precision)
    model = engine.prepare(Halves())
    out = model(torch.ones(1, 2))
    assert model.seen == [inside]
    assert (out["out"].dtype, out["index"].dtype, out["list"][0].dtype) == (torch.float32, torch.int64, torch.float32)
    with pytest.raises(KeyError, match="inside"):
        model(torch.ones(1, 2), fail=True)
    assert not torch.is_autocast_enabled("cpu")
    assert model.layer.weight.dtype == torch.float32


def test_autocast_can_be_left_to_the_user() -> None:
    engine = Engine(accelerator="cpu", precision="bf16-mixed")
    model = engine.prepare_model(Halves(), autocast=False)
    model(torch.ones(1, 2))
    with engine.autocast():
        assert model(torch.ones(1, 2))["out"].dtype == torch.bfloat16
    assert model.seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_zero_grad_stands_at_either_end(first: bool, precision: str) -> None:
    engine = Engine(accelerator="cpu", accumulate_grad_batches=2, precision=precision)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    weights = []
    for i in range(6):
        with engine.accumulate(model):
            if first:
                optimizer.zero_grad()
            engine.backward(model(torch.full((1, 1), i / 8)).mean())  # fp16 holds 65536 * 5 / 8
            optimizer.step()
            if not first:
                optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0.0, -0.0625, -0.0625, -0.375, -0.375, -0.9375]  # the means of (0, 1), (2, 3), (4, 5), over 8


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_gradients_that_are_thrown_away_after_clipping(precision: str) -> None:
    engine = Engine(accelerator="cpu", precision=precision)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    engine.backward(model(torch.full((2, 1), 0.75)).mean())
    engine.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.zero_grad()  # the user did not like this batch
    engine.backward(model(torch.full((2, 1), 0.5)).mean())
    engine.clip_grad_norm_(model.parameters(), 1.0)
    assert model.weight.grad.item() == pytest.approx(0.5)
    optimizer.step()
    assert model.weight.item() == pytest.approx(-0.5)
