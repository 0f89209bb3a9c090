"""``LocalSGD``: each rank's own steps and averages of the weights, as in Accelerate."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import accelerate as theirs
import accelerate.local_sgd as their_local_sgd
import pytest
import torch
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader, TensorDataset

from engine.interop import accelerate as ours
from engine.interop.accelerate.local_sgd import LocalSGD


def weights(accelerator: Any, block: type[Any], accumulates: bool = False, **options: Any) -> list[list[float]]:
    """The weights after each of three steps in a block that averages every second one, after the block, and after one more step.

    ``accumulates``: each step stands in a block of ``accumulate``, as in Accelerate's own example.
    """
    inputs = torch.arange(24.0).reshape(12, 2) / 24
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    loader = DataLoader(TensorDataset(inputs), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    batches = iter(loader)

    def step() -> None:
        with accelerator.accumulate(model) if accumulates else nullcontext():
            accelerator.backward(model(next(batches)[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def state() -> list[float]:
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    states = []
    with block(accelerator=accelerator, model=model, local_sgd_steps=2, **options) as local:
        for _ in range(3):
            step()
            local.step()
            states.append(state())
    states.append(state())
    step()
    return [*states, state()]


def rank_ours() -> list[list[float]]:
    return weights(ours.Accelerator(cpu=True), LocalSGD)


def rank_padded() -> list[list[float]]:
    return weights(ours.Accelerator(cpu=True, rules="accelerate"), LocalSGD)


def rank_theirs() -> list[list[float]]:
    return weights(theirs.Accelerator(cpu=True), their_local_sgd.LocalSGD)


def rank_accumulating() -> list[list[float]]:
    return weights(ours.Accelerator(cpu=True), LocalSGD, accumulates=True)


def rank_accumulating_padded() -> list[list[float]]:
    return weights(ours.Accelerator(cpu=True, rules="accelerate"), LocalSGD, accumulates=True)


def rank_disabled() -> list[list[float]]:
    return weights(ours.Accelerator(cpu=True), LocalSGD, enabled=False)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize("rules", ["ours", "padded", "accumulating", "accumulating_padded"])
def test_the_weights_are_those_of_accelerate(two: dict[str, list[Any]], rules: str) -> None:
    torch.testing.assert_close(two[rules], two["theirs"], rtol=1e-6, atol=1e-6)


def test_ranks_have_equal_weights_after_an_average_and_only_then(two: dict[str, list[Any]]) -> None:
    first, second = two["ours"]
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True, False, True, True]


def test_a_disabled_block_averages_gradients_in_each_step(two: dict[str, list[Any]]) -> None:
    first, second = two["disabled"]
    assert first == second
    assert first != two["ours"][0]


def test_one_process_has_nothing_to_average() -> None:
    assert weights(ours.Accelerator(cpu=True), LocalSGD)[-1] == pytest.approx(
        weights(theirs.Accelerator(cpu=True), their_local_sgd.LocalSGD)[-1]
    )


def test_a_divided_model_is_an_error() -> None:
    accelerator: Any = SimpleNamespace(distributed_type="FSDP")
    with pytest.raises(NotImplementedError, match="needs the whole model on each rank; with FSDP"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 2)
