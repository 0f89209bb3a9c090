"""Nested batches: containers keep their types, tensors are moved, samples are counted."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.utils.tree import batch_size, map_tensors, move

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Item:
    name: str
    x: Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Own:
    """Stands for a Hugging Face BatchEncoding: it moves itself."""

    def __init__(self) -> None:
        self.moved_to: Any = None

    def to(self, device: torch.device) -> Own:
        self.moved_to = device
        return self


def test_map_keeps_containers() -> None:
    one = torch.ones(2)
    tree = {
        "a": [one, (one, 3)],
        "b": Pair(one, "n"),
        "c": OrderedDict(z=one),
        "d": None,
        "e": "text",
        "f": Item("i", one),
    }
    out = map_tensors(lambda t: t * 2, tree)
    assert list(out) == list(tree)
    assert type(out["a"]) is list
    assert type(out["a"][1]) is tuple
    assert type(out["b"]) is Pair
    assert type(out["c"]) is OrderedDict
    assert type(out["f"]) is Item
    assert (out["a"][1][1], out["b"].name, out["d"], out["e"], out["f"].name) == (3, "n", None, "text", "i")
    for tensor in (out["a"][0], out["a"][1][0], out["b"].x, out["c"]["z"], out["f"].x):
        assert tensor.tolist() == [2.0, 2.0]
    assert one.tolist() == [1.0, 1.0]
    assert tree["f"].x is one


def test_map_takes_frozen_dataclasses_and_graphs() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    frozen = Frozen(loss)
    out = map_tensors(lambda t: t + 1, frozen)
    assert type(out) is Frozen
    assert out.x.tolist() == [3.0]
    assert out.x.grad_fn is not None
    assert frozen.x is loss


def test_move_casts_floating_point_only() -> None:
    moved = move(
        {"x": torch.ones(2), "y": torch.ones(2, dtype=torch.int64), "m": torch.ones(2, dtype=torch.bool)},
        CPU,
        torch.bfloat16,
    )
    assert (moved["x"].dtype, moved["y"].dtype, moved["m"].dtype) == (torch.bfloat16, torch.int64, torch.bool)


def test_move_without_dtype_copies_nothing() -> None:
    x = torch.ones(2)
    assert move([x], CPU)[0] is x


def test_move_lets_objects_move_themselves() -> None:
    own = Own()
    assert move(own, CPU) is own
    assert own.moved_to == CPU


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(3, 2), torch.zeros(7)], 3),
        ({"id": "x", "y": torch.zeros(4)}, 4),
        (UserDict({"input_ids": torch.zeros(4, 9)}), 4),
        ((1, "a", [torch.tensor(1.0), torch.zeros(6)]), 6),
        (Item("i", torch.zeros(2, 9)), 2),
        (Pair(torch.zeros(8), "n"), 8),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
    ],
)
def test_batch_size(tree: Any, expected: int | None) -> None:
    assert batch_size(tree) == expected
