"""Nested batches: containers keep their types, tensors are moved, samples are counted."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding, BatchFeature
from transformers.modeling_outputs import BaseModelOutput

from engine.utils.tree import batch_size, cast, leaves, map_tensors, move, on_host

CPU, META = torch.device("cpu"), torch.device("meta")


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


@attrs.frozen
class Scan:
    x: Tensor
    note: str


class Own:
    """Moves itself, in place, and forgets to return itself."""

    def __init__(self) -> None:
        self.x = torch.ones(3, 2)
        self.batch_size = 3

    def to(self, device: torch.device) -> None:
        self.x = self.x.to(device)


class Graph(Own):
    """Like a PyG ``Data``: it can be copied, moves in place, and takes ``non_blocking``."""

    told: Any = None

    def __copy__(self) -> Graph:
        copied = Graph()
        copied.__dict__.update(self.__dict__)
        return copied

    def to(self, device: torch.device, *args: Any, non_blocking: bool = False) -> Graph:  # type: ignore[override]
        self.x, self.told = self.x.to(device), non_blocking
        return self


@dataclass
class Holder:
    graph: Graph
    x: Tensor


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


def packed() -> PackedSequence:
    """Two sequences of 3 and 1 numbers, the short one given first."""
    return pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    assert [len(packed().data), batch_size(packed())] == [4, 2]
    for tree in (packed(), [packed()], {"x": (packed(), "text")}):
        moved = move(tree, META, torch.bfloat16)
        found = moved if isinstance(tree, PackedSequence) else moved[0] if isinstance(tree, list) else moved["x"][0]
        assert type(found) is PackedSequence
        assert [t.device.type for t in found] == ["meta", "cpu", "meta", "meta"]
        assert (found.data.dtype, found.batch_sizes.tolist()) == (torch.bfloat16, [2, 1, 1])


def test_an_lstm_takes_a_moved_packed_sequence() -> None:
    net, given = torch.nn.LSTM(2, 4), packed()
    out, _ = net(move(given, CPU))
    assert torch.equal(out.data, net(given)[0].data)
    half, _ = net.to(torch.bfloat16)(move(given, CPU, torch.bfloat16))
    assert half.data.dtype is torch.bfloat16


def test_hugging_face_batches_move_themselves() -> None:
    """They move in place: the user's batch, which may come again in the next epoch, stays where it is."""
    ids, pixels = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 3, 4, 4)
    text, image = BatchEncoding({"input_ids": ids, "words": ["a", "b"]}), BatchFeature({"pixel_values": pixels})
    assert (batch_size(text), batch_size((image, 1))) == (2, 2)
    moved = move({"text": text, "image": image}, META, torch.bfloat16)
    assert (type(moved["text"]), type(moved["image"])) == (BatchEncoding, BatchFeature)
    assert moved["text"]["input_ids"].device == moved["image"]["pixel_values"].device == META
    assert (moved["text"]["input_ids"].dtype, moved["image"]["pixel_values"].dtype) == (torch.int64, torch.bfloat16)
    assert moved["text"]["words"] == ["a", "b"]
    assert text["input_ids"] is ids
    assert image["pixel_values"] is pixels
    assert cast(image, torch.float16)["pixel_values"].dtype is torch.float16


def test_objects_inside_containers_move_themselves() -> None:
    given = Graph()
    for found in (
        move([given], META)[0],
        move((1, {"g": given}), META)[1]["g"],
        move(Holder(given, torch.ones(2)), META).graph,
    ):
        assert (found.x.device.type, found.told) == ("meta", True)
    assert (given.x.device.type, given.told) == ("cpu", None)
    assert move(given, CPU).told is False  # a copy to the host that nobody waits for may be read before it is there
    own = Own()
    assert move([own], META)[0] is own
    assert own.x.device == META
    assert batch_size(given) == batch_size({"a": "text", "g": own}) == 3


def test_classes_and_fields_named_to_are_left_alone() -> None:
    class Edge(NamedTuple):
        source: Tensor
        to: Tensor

    moved = move([Edge(torch.ones(1), torch.ones(1)), Tensor], META)
    assert (moved[0].to.device.type, moved[1]) == ("meta", Tensor)


def test_unusual_containers_keep_what_they_are() -> None:
    class Labelled(list[Any]):
        label = ""

    one = torch.ones(2)
    labelled = Labelled([one, "a"])
    labelled.label = "train"
    tree = [defaultdict(list, a=[one]), UserDict(a=one), MappingProxyType({"a": one}), deque([one], maxlen=5)]
    tree += [labelled, Scan(one, "n"), torch.Size([2]), range(3), one.max(0), bytearray(b"x"), numpy.ones(2)]
    found = map_tensors(lambda t: t + 1, tree)
    assert [type(item) for item in found] == [type(item) for item in tree]
    assert found[0].default_factory is list
    assert (found[3].maxlen, found[4].label, found[5].note, found[7]) == (5, "train", "n", range(3))
    values = (found[0]["a"][0], found[1]["a"], found[2]["a"], found[3][0], found[4][0], found[5].x)
    assert [value.tolist() for value in values] == [[2.0, 2.0]] * 6
    assert (found[8].values.item(), found[10] is tree[10], one.tolist()) == (2.0, True, [1.0, 1.0])
    output = map_tensors(lambda t: t + 1, BaseModelOutput(last_hidden_state=one))
    assert output.last_hidden_state is output["last_hidden_state"]
    assert output[0].tolist() == [2.0, 2.0]


def test_a_container_that_cannot_be_made_again_is_named() -> None:
    class Strange(Mapping[str, Any]):
        def __init__(self, a: Any, b: Any) -> None:
            self.items_ = {"a": a, "b": b}

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __iter__(self) -> Iterator[str]:
            return iter(self.items_)

        def __len__(self) -> int:
            return 2

    tree = Strange(1, "b")
    assert map_tensors(torch.clone, tree) is tree
    with pytest.raises(TypeError, match=r"holds a Strange, .*method to\(device\)"):
        map_tensors(torch.clone, Strange(1, torch.ones(1)))


def test_sparse_and_nested_tensors_are_moved_and_counted() -> None:
    sparse = torch.eye(3).to_sparse()
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert [batch_size(t) for t in (sparse, jagged)] == [3, 2]
    for tensor in (sparse, jagged):
        moved = move([tensor], META)[0]
        assert (moved.device.type, moved.layout) == ("meta", tensor.layout)
    assert [move(t, CPU, torch.bfloat16).dtype for t in (sparse, jagged)] == [torch.bfloat16] * 2


def test_leaves_come_in_order() -> None:
    a, b, sequence = torch.ones(1), torch.ones(2), packed()
    assert [id(t) for t in leaves({"x": [a, "text"], "p": sequence, "y": Item("i", b)})] == [
        id(t) for t in (a, *sequence, b)
    ]


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
        (Scan(torch.zeros(3), "n"), 3),
        (torch.Size([2]), None),
        (numpy.zeros(3), None),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
    ],
)
def test_batch_size(tree: Any, expected: int | None) -> None:
    assert batch_size(tree) == expected


def test_tensors_on_the_host_stay_shared() -> None:
    tied = torch.ones(2, requires_grad=True) * 2
    found = on_host({"a": tied, "b": [tied], "n": 1})
    assert found["a"] is found["b"][0]
    assert found["a"].grad_fn is None
    assert found["n"] == 1
