"""The same scripts with Accelerate and with ours under its rules, on one process and on two: the same losses, rates and weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

theirs: Any = pytest.importorskip("accelerate")

from engine.interop import accelerate as ours  # noqa: E402

X = torch.randn(26, 3, generator=torch.Generator().manual_seed(0))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"steps": 3},
    "window over epochs": {"steps": 3, "plugin": {"sync_with_dataloader": False}},
    "each batch reduced": {"steps": 3, "plugin": {"sync_each_batch": True}},
    "split": {"steps": 2, "split_batches": True},
    "dispatched": {"steps": 2, "dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True, "data_seed": 5},
    "drop_last": {"drop_last": True},
    "stream": {"stream": True, "dispatch_batches": False, "steps": 2},
    "dispatched stream": {"stream": True, "steps": 2},
    "cleared first": {"steps": 2, "zero_first": True},
    "one cycle": {"one_cycle": True},
    "bf16": {"mixed_precision": "bf16"},
    "clipped": {"steps": 2, "clip": 0.1},
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(x, x.sum(0, keepdim=True)) for x in X])


def train(
    package: Any, *, steps: int = 1, plugin: Any = None, drop_last: bool = False, stream: bool = False, one_cycle: bool = False,
    zero_first: bool = False, clip: float | None = None, mixed_precision: str = "no", **config: Any,
) -> list[float]:  # fmt: skip
    """Every gathered loss, every learning rate, and the weights at the end."""
    utils, rules = package.utils, {"rules": "accelerate"} if package is ours else {}
    for state in (package.state.AcceleratorState, package.state.GradientState):
        state._reset_state()
    utils.set_seed(3)
    accelerator = package.Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=steps, **(plugin or {})),
        dataloader_config=utils.DataLoaderConfiguration(**config),
        **rules,
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data: Any = Stream() if stream else TensorDataset(X, X.sum(1, keepdim=True))
    loader: Any = DataLoader(data, batch_size=4, shuffle=None if stream else True, drop_last=drop_last)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    if one_cycle:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    told: list[float] = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                schedule.step()
                if not zero_first:
                    optimizer.zero_grad()
            told += accelerator.gather_for_metrics(x).flatten().tolist()
            told += [accelerator.reduce(loss.detach(), "mean").item(), schedule.get_last_lr()[0]]
    return told + [v for p in accelerator.unwrap_model(model).parameters() for v in p.flatten().tolist()]


def reduce_late(package: Any) -> list[float]:
    """The weights after each of three steps whose two forward passes run before the ranks are to reduce anything."""
    for state in (package.state.AcceleratorState, package.state.GradientState):
        state._reset_state()
    package.utils.set_seed(3)
    accelerator = package.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    weights: list[float] = []
    for step in range(3):
        one, other = (x[accelerator.process_index :: accelerator.num_processes] for x in X[8 * step :][:8].split(4))
        with accelerator.no_sync(model):
            first, second = model(one).square().mean(), model(other).square().mean()
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        optimizer.step()
        optimizer.zero_grad()
        weights += [v for p in model.parameters() for v in p.flatten().tolist()]
    return weights


def rank_reduced_late() -> list[list[float]]:
    return [reduce_late(theirs), reduce_late(ours)]


def rank_cases() -> dict[str, list[list[float]]]:
    return {name: [train(theirs, **case), train(ours, **case)] for name, case in CASES.items()}


@pytest.fixture(scope="module")
def two() -> Any:
    return functools.cache(lambda: ranks_of_file(__file__, 2))


@pytest.mark.filterwarnings("ignore")  # Accelerate's own, and torch's about a scheduler that steps first
@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str) -> None:
    torch.testing.assert_close(train(ours, **CASES[name]), train(theirs, **CASES[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_two_processes(two: Any, name: str) -> None:
    for rank in two()["cases"]:
        expected, found = rank[name]
        assert len(found) == len(expected)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_that_are_reduced_late(two: Any) -> None:
    ranks = two()["reduced_late"]
    for expected, weights in ranks:
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    assert ranks[0] == ranks[1]


@pytest.mark.filterwarnings("ignore")  # Accelerate's own
def test_gradients_that_no_other_rank_has() -> None:
    torch.testing.assert_close(reduce_late(ours), reduce_late(theirs), rtol=1e-6, atol=1e-6)
