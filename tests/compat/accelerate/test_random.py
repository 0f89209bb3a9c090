"""Generators' states go from the main process to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file

from engine import Engine
from engine.compat.accelerate.utils.random import share_states


def drawn(*kinds: Any, given: bool = True) -> list[float]:
    """What this rank's global generator and one of its own draw after the states of ``kinds`` were shared; seeds are ranks."""
    group = Engine(accelerator="cpu").group
    torch.manual_seed(group.rank)
    generator = torch.Generator().manual_seed(10 + group.rank)
    share_states(group, kinds, generator if given else None)
    return [torch.rand(()).item(), torch.rand((), generator=generator).item()]


def first(seed: int) -> float:
    return torch.rand((), generator=torch.Generator().manual_seed(seed)).item()


def rank_torch() -> list[float]:
    return drawn("torch")


def rank_generator() -> list[float]:
    return drawn("generator")


def rank_both() -> list[float]:
    return drawn("torch", "generator")


def rank_none() -> list[float]:
    return drawn()


def rank_not_given() -> list[float]:
    return drawn("generator", given=False)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize(
    ("kinds", "main", "other"),
    [
        ("torch", (0, 10), (0, 11)),
        ("generator", (0, 10), (1, 10)),
        ("both", (0, 10), (0, 10)),
        ("none", (0, 10), (1, 11)),
        ("not_given", (0, 10), (1, 11)),
    ],
)
def test_only_what_is_named_is_shared(
    two: dict[str, list[Any]], kinds: str, main: tuple[int, int], other: tuple[int, int]
) -> None:
    assert two[kinds] == [[first(seed) for seed in seeds] for seeds in (main, other)]


def test_one_process_keeps_its_state() -> None:
    assert drawn("torch", "generator") == [first(0), first(10)]
