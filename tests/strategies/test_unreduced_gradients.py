"""Gradients that manual optimization averages: one collective a step, whatever each rank has, and no wait of the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.internals import group_of_job
from support.ranks import ranks_of_file
from torch import Tensor

from engine.strategies.unreduced_gradients import GradientAverage


def parameter(size: int, grad: float | None, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.zeros(size, dtype=dtype, requires_grad=True)
    made.grad = None if grad is None else torch.full((size,), grad, dtype=dtype)
    return made


def grads(parameters: list[Tensor]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def rank_means() -> Any:
    ranks = group_of_job()
    mine = float(ranks.rank)
    frozen = parameter(2, None).requires_grad_(False)
    parameters = [
        parameter(2, 1 + mine),
        parameter(1, None if mine else 4.0),  # on rank 0 only
        parameter(3, None),  # on no rank
        parameter(1, 2 * mine, torch.float64),
        frozen,
    ]
    GradientAverage()(ranks, parameters)
    return grads(parameters)


def rank_collectives() -> Any:
    ranks, average = group_of_job(), GradientAverage()
    parameters = [parameter(2, 1.0), parameter(3, float(ranks.rank))]
    average(ranks, parameters)  # the ranks compare what they train

    def read(self: Tensor) -> Any:
        raise AssertionError("the host reads a tensor")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "cpu"):
            patch.setattr(Tensor, name, read)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            average(ranks, parameters)
    counted = Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))
    return [counted, grads(parameters)]


def rank_changes() -> Any:
    ranks, average = group_of_job(), GradientAverage()
    parameters = [parameter(1, 1.0), parameter(2, 2.0)]
    average(ranks, parameters)
    parameters[1].requires_grad_(False).grad = None  # on all ranks
    average(ranks, parameters)
    told = ""
    parameters[1 if ranks.rank else 0].requires_grad_(not parameters[1 if ranks.rank else 0].requires_grad)
    parameters[0].grad = torch.ones(1) if parameters[0].requires_grad else None
    try:
        average(ranks, parameters)
    except ValueError as error:
        told = str(error)
    return told


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_means(found: dict[str, list[Any]]) -> None:
    assert found["means"] == [[[1.5, 1.5], [2.0], None, [1.0], None]] * 2


def test_one_collective_that_nobody_reads(found: dict[str, list[Any]]) -> None:
    assert found["collectives"] == [[{"gloo:all_reduce": 1}, [[1.0, 1.0], [0.5, 0.5, 0.5]]]] * 2


def test_ranks_that_train_different_parameters(found: dict[str, list[Any]]) -> None:
    for told in found["changes"]:
        assert (
            "ranks 0 and 1 step an optimizer with different trained parameters: one of them does not train number "
            in told
        )
