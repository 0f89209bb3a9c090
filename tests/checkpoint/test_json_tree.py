"""Packing of trees: exact types come back, and everything else is refused with its place."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from engine.checkpoint.json_tree import pack, unpack


def round_trip(tree: Any) -> Any:
    value, tensors = pack(tree)
    return unpack(json.loads(json.dumps(value, allow_nan=False)), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    return a == b or (a != a and b != b)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        10**30,
        0.1,
        -0.0,
        math.nan,
        -math.inf,
        "text \ud800 \0",
        b"\x00\xff",
        [],
        {},
        (1, (2, [3])),
        {1, 2},
        frozenset("a"),
        {"a": {"b": [1.5, None]}},
        {1: "int", "1": "text", None: "none", (1, ("a", True)): "tuple", 2.5: "float", b"b": "bytes"},
        {True: "bool"},
        {"$": "float", "value": "a key of ours"},
        {"$x": 1},
        OrderedDict(b=1, a=2),
        Counter([3, 3, 4]),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.empty(0, 3),
        {"__metadata__": torch.ones(1), "\ud800": torch.zeros(1)},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        numpy.float32(0.1),
        numpy.float64("nan"),
        numpy.int64(-1),
        numpy.bool_(True),
        numpy.arange(6, dtype="uint16").reshape(2, 3)[::-1],
        numpy.array(1.5),
    ],
    ids=repr,
)
def test_round_trip(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def test_the_state_of_an_optimizer_and_of_schedulers() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert same(round_trip(optimizer.state_dict()), optimizer.state_dict())
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    ):
        assert same(round_trip(scheduler.state_dict()), scheduler.state_dict())


def test_one_tensor_in_two_places_stays_one() -> None:
    shared = torch.ones(3)
    value, tensors = pack({"a": shared, "b": [shared, shared.view(3)], "part": shared[:2]})
    assert list(tensors) == ["a", "part"]
    found = unpack(value, tensors)
    assert found["b"][0] is found["a"]


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    found = round_trip(nn.Parameter(torch.ones(2)))
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_an_array_is_copied() -> None:
    array = numpy.zeros(2)
    value, tensors = pack(array)
    array[0] = 1
    assert unpack(value, tensors)[0] == 0


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x")


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, object()]}, r"the state\['a'\]\[1\] is of type builtins.object"),
        ({"a": {(1, 2): nn.Linear(1, 1)}}, r"the state\['a'\]\[\(1, 2\)\] .*save its state_dict\(\)"),
        ([Colour.RED], r"the state\[0\] .*Colour.*plain int"),
        ([Point(1)], r"the state\[0\] .*plain tuple"),
        ({Colour.RED: 1}, r"the state has a key of type Colour"),
        ([{frozenset(): 1}], r"the state\[0\] has a key of type frozenset"),
        (lambda: 0, r"function"),
        (torch.float32, r"torch.dtype"),
        (1j, r"complex"),
        ([torch.ones(2).to_sparse()], r"the state\[0\] is a tensor of a special kind"),
        (torch.ones(2).as_subclass(Sub), r"special kind \(Sub"),
        (torch.zeros(1, device="meta"), r"on meta"),
        (numpy.array(["a"]), r"<U1.*array of numbers"),
        (numpy.array([object()]), r"object.*array of numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused_with_its_place(tree: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(tree)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "module", "name": "os"},
        {"$": ["tuple"]},
        {"$": "tuple"},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "set", "items": [[]]},
        {"$": "tensor", "name": "absent"},
        {"$": "tensor", "name": []},
        {"$": "float", "value": "1"},
        {"$": "bytes", "base64": "*"},
        {"$": "number", "dtype": "object", "value": 1},
        {"$": "number", "dtype": "int8", "value": 1000},
    ],
    ids=repr,
)
def test_a_value_of_another_form_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        unpack([value], {})
