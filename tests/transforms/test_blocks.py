"""What is sharded as one: by default the repeated blocks; by class, name, size or the model's own word."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from engine.transforms.blocks import blocks_of, matching, repeated_blocks, shared


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Block(), Block(), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 10, bias=False)


class Telling(Net):
    def __init__(self, told: Any = None) -> None:
        super().__init__()
        self.told = told

    def blocks(self) -> Any:
        return [self.head] if self.told is None else self.told


class Holding(nn.Module):
    """Many models have an attribute of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def names(model: nn.Module, *chosen: Any, min_size: int = 0) -> list[str]:
    known = {id(m): name for name, m in model.named_modules()}
    return [known[id(m)] for m in blocks_of(model, chosen, min_size)]


def test_by_default_the_repeated_blocks() -> None:
    assert names(Net()) == ["layers.1", "layers.0"]
    assert names(Holding()) == ["blocks.1", "blocks.0"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == ["2", "0"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []
    assert names(nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList()])})) == [
        "a.0.1",
        "a.0.0",
    ]
    assert repeated_blocks(nn.Linear(1, 1)) == []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([Block], ["layers.1", "layers.0"]),
        (["Block"], ["layers.1", "layers.0"]),
        (["layers.*.mlp", "head"], ["head", "layers.1.mlp", "layers.0.mlp"]),
        ([nn.LayerNorm, Block], ["layers.2", "layers.1", "layers.1.norm", "layers.0", "layers.0.norm"]),
    ],
)
def test_by_class_and_name(chosen: Any, expected: list[str]) -> None:
    found = names(Net(), *chosen)
    assert sorted(found) == sorted(expected)
    for outer in found:
        assert all(found.index(inner) < found.index(outer) for inner in found if inner.startswith(outer + "."))


def test_names_do_not_count_the_wrapper_of_fit() -> None:
    wrapper = nn.Module()
    wrapper.module = Net()
    assert names(wrapper, "layers.0") == ["module.layers.0"]


def test_by_size() -> None:
    # Each mlp has 4 * 8 + 8 + 8 * 4 + 4 = 76 parameters, embedding and head 40 each.
    assert sorted(names(Net(), min_size=76)) == ["layers.0.mlp", "layers.1.mlp"]
    assert sorted(names(Net(), min_size=41)) == ["layers.0.mlp", "layers.1.mlp"]
    assert names(Net(), min_size=77) == ["layers.1", "layers.0"]
    assert names(Net(), nn.Linear, min_size=40) == ["head", *(f"layers.{i}.mlp.0" for i in (1, 0))]


def test_by_the_models_own_word() -> None:
    assert names(Telling()) == ["head"]
    assert names(Telling(), "Block") == ["layers.1", "layers.0"]
    for told in ([nn.Linear(1, 1)], [3]):
        with pytest.raises(ValueError, match=r"Telling.blocks\(\) returned .*: return modules of the model"):
            blocks_of(Telling(told), [], 0)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("Blok", "no class or module is called 'Blok'; did you mean 'Block'"),
        (nn.Conv2d, "no class or module is called 'Conv2d'.*classes: Block, Embedding"),
        ("layers", r"'layers' is a list of modules and has no forward pass; give its members, 'layers\.\*'"),
    ],
)
def test_wrong_choices(choice: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        blocks_of(Net(), [choice], 0)


def test_shared_parameters() -> None:
    model = Net()
    model.head.weight = model.embed.weight
    model.layers[1].norm.weight = model.layers[0].norm.weight
    model.layers[1].norm.bias = model.layers[2].bias
    with_rest, between = shared(model, blocks_of(model, [], 0))
    assert with_rest == {model.layers[2].bias}
    assert between == {model.layers[0].norm.weight}


def test_matching_names() -> None:
    named = [("module.a.w", nn.Parameter()), ("module.b.w", nn.Parameter())]
    assert matching(named, ["b.*"], "ignore") == [named[1][1]]
    with pytest.raises(ValueError, match=r"ignore: no parameter is called 'c.w'.*there are a.w, b.w"):
        matching(named, ["c.w"], "ignore")
