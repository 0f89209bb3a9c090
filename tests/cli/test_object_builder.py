"""A type of plain data is read in one way: as a strategy's option in code and in a file, and as a parameter of ``fit run``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.cli.object_builder import ObjectBuilder
from engine.cli.requested_objects import Component
from engine.cli.terminal import UsageError
from engine.config import yaml_text
from engine.config.named_options import NamedOptions
from engine.config.typed_values import construct
from engine.config.yaml_text import flow

Kind = Enum("Kind", ["PLAIN", "FANCY"])
Mode = Literal["best", "last"]


@dataclass(frozen=True)
class Part:
    rate: float = 1.0
    names: tuple[str, ...] = ()


@dataclass
class Needed:
    rate: float


def taking(hint: Any) -> Callable[..., Any]:
    """A function with one parameter of this type, which it returns."""

    def target(*, x):
        return x

    target.__annotations__ = {"x": hint}
    return target


def option(hint: Any, value: Any) -> Any:
    return construct("strategy", NamedOptions("mine", {"x": value}, {"x": "here"}), taking(hint))


def in_file(hint: Any, value: Any) -> Any:
    value = yaml_text.construct(yaml_text.compose(flow(value), "there"))
    return ObjectBuilder(Component("model", "mine", taking(hint), {"x": value}, {"x": "here"})).build()[0]


def on_command_line(hint: Any, value: Any) -> Any:
    text = value if isinstance(value, str) else flow(value)
    return ObjectBuilder(Component("model", "mine", taking(hint), overrides=[("x", text)])).build()[0]


@pytest.mark.parametrize("door", [option, in_file, on_command_line])
@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (float | None, 2, 2.0),
        (Mode | None, "last", "last"),
        (Mode | None, None, None),
        (Literal[1, 2] | None, 2, 2),
        (Literal[Kind.PLAIN] | None, "PLAIN", Kind.PLAIN),
        (int | Mode, "best", "best"),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[int], [1, 2, 2], {1, 2}),
        (list[int] | list[str], ["a"], ["a"]),
        (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
        (dict[int, float], {"3": 1}, {3: 1.0}),
        (Path | None, "~/x", Path.home() / "x"),
        (timedelta, "1:30:00", timedelta(minutes=90)),
        (torch.dtype | None, "bf16", torch.bfloat16),
        (Kind, "FANCY", Kind.FANCY),
        (list[Kind], ["FANCY"], [Kind.FANCY]),
        (Part, {"rate": 2, "names": ["a"]}, Part(2.0, ("a",))),
        (Part | None, {"names": []}, Part()),
    ],
    ids=str,
)
def test_every_door_reads_a_type_alike(door: Callable[..., Any], hint: Any, given: Any, expected: Any) -> None:
    found = door(hint, given)
    assert (found, type(found)) == (expected, type(expected))


WRONG: list[tuple[Any, Any, str]] = [
    (float, "big", "x='big' is of type str: give float"),
    (int | None, 1.5, "x=1.5 is of type float: give int or None (null in YAML)"),
    (int, True, "x=True is of type bool: give int"),
    (Literal[1, 2], True, "x=True is of type bool: give 1 or 2"),
    (Mode | None, "bst", "x='bst' is unknown; did you mean 'best'?; possible: 'best', 'last'"),
    (list[int], [1, "a"], "x.1='a' is of type str: give int"),
    (dict[str, int], {"a": "b"}, "x.a='b' is of type str: give int"),
    (Kind, "FNCY", "x='FNCY' is unknown; did you mean 'FANCY'?; possible: PLAIN or FANCY"),
]


@pytest.mark.parametrize(("hint", "given", "message"), WRONG, ids=str)
def test_every_door_says_the_same(hint: Any, given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        option(hint, given)
    assert str(caught.value) == f"here: strategy.{message}"
    with pytest.raises(UsageError) as refused:
        in_file(hint, given)
    assert str(refused.value) == f"here: model.x does not fit: {message}"
    with pytest.raises(UsageError) as refused:
        on_command_line(hint, given)
    assert str(refused.value) == f"command line model.x: model.x does not fit: {message}"


@pytest.mark.parametrize(("hint", "given"), [(float, "0.1"), (int, "3"), (bool, "yes"), (list[int], "[1]")], ids=str)
def test_quoted_text_of_a_file_is_text(hint: Any, given: str) -> None:
    with pytest.raises(TypeError, match=r"^here: strategy.x=.* is of type str"):
        option(hint, given)
    with pytest.raises(UsageError, match=r"^here: model.x does not fit: x=.* is of type str"):
        in_file(hint, given)


def test_a_wrong_value_of_the_file_has_its_line_though_the_command_line_replaces_it() -> None:
    component = Component("model", "mine", taking(int), {"x": "a"}, {"x": "file fit.yaml:3"}, [("x", "1")])
    with pytest.raises(UsageError, match=r"^file fit.yaml:3: model.x does not fit"):
        ObjectBuilder(component)


def test_a_field_that_is_unknown_or_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"^here: strategy.x.rte=1: there is no 'rte'; did you mean 'rate'\?"):
        option(Part, {"rte": 1})
    with pytest.raises(TypeError, match=r"^here: strategy.x={}: .*missing 1 required .*'rate'"):
        option(Needed, {})
