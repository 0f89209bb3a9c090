"""Kinds of settings: what each accepts in code and in YAML, and what a shell completes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from yaml import SafeLoader, compose

from engine import Duration
from engine.config.kinds import (
    PRECISIONS,
    BatchLimit,
    CallbackObjects,
    Compilation,
    Flag,
    FlagOrNumber,
    Folder,
    Kind,
    Maximum,
    PrecisionName,
    Recomputation,
    RunName,
    Schedule,
    StrategyName,
    Time,
    WholeNumber,
    Word,
    precision_name,
)


def test_every_precision_name_leads_to_one_that_stays() -> None:
    for name, normal in PRECISIONS.items():
        assert precision_name(name) == precision_name(normal) == normal


@pytest.mark.parametrize(
    ("kind", "accepts", "words"),
    [
        (WholeNumber(0), "int", ()),
        (WholeNumber(0, none="no limit"), "int | None", ()),
        (Word("a", "b"), "str", ("a", "b")),
        (Word("a", "b", none="neither"), "str | None", ("a", "b", "null")),
        (Flag(), "bool", ("true", "false")),
        (Flag("warn", none="torch's"), "bool | str | None", ("true", "false", "warn", "null")),
        (Time(1), "str | timedelta | Duration", ()),
        (Time(none="no limit"), "str | timedelta | Duration | None", ()),
        (BatchLimit(zero_is_all=True), "int | float", ()),
        (BatchLimit(), "int | float | None", ()),
    ],
)
def test_what_a_kind_accepts_and_completes_follows_from_its_arguments(
    kind: Kind, accepts: str, words: tuple[str, ...]
) -> None:
    assert (kind.accepts, kind.words) == (accepts, words)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Word("no", "yes"), "no", "no"),
        (Folder(), "2024", "2024"),
        (RunName(), "1e-3", "1e-3"),
        (RunName(), "null", None),
        (Time(), "10:00", "10:00"),
        (PrecisionName(), "{name: no, x: yes}", {"name": "no", "x": True}),
        (Flag(), "1", True),
        (Compilation(), "0", False),
        (Compilation(), "{dynamic: 1}", {"dynamic": 1}),
        (FlagOrNumber(), "1", 1),
        (WholeNumber(0), "1_000", 1000),
        (Word("a", none="none"), "null", None),
    ],
)
def test_yaml_is_read_by_the_kind(kind: Kind, text: str, value: Any) -> None:
    found = kind.from_yaml(compose(text, SafeLoader))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((text, "it is empty") for text in ("", "  ")),
        *((text, "it has a slash, and a name is one folder") for text in ("a/b", "/a", "a/", "../a", "a\\b", "s3://b")),
        *((text, "it begins with '.'") for text in (".", "..", "...", ".a")),
        *((text, f"it begins with {text[0]!r}") for text in ("-x", "~a")),
        *((text, "it begins or ends with a space") for text in (" a", "a ", "a\n")),
        *(
            (text, "it has characters that cannot be printed")
            for text in ("a\nb", "a\0b", "a\x1b[2Jb", "a\u202eb", "a\ud800b")
        ),
        *((text, "it has more than 200 bytes") for text in ("a" * 201, "ü" * 101)),
        *(
            (text, "later runs of one name get such an ending")
            for text in ("version_0", "version_12", "a_version_1", "Version_3")
        ),
        *(
            (text, "a run without a name keeps something else")
            for text in ("checkpoints", "Checkpoints", "run.json", "hang")
        ),
    ],
)
def test_a_name_is_that_of_one_folder(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^name={re.escape(repr(value))} is not possible: {re.escape(reason)}"):
        RunName().normalized("name", value)
    with pytest.raises(TypeError, match=r"^name=3 is of type int: give a name such as 'lr=0\.1'"):
        RunName().normalized("name", 3)


def test_nothing_and_callbacks_are_no_yaml() -> None:
    with pytest.raises(ValueError, match=r"^is empty: give a value, or null for None$"):
        Flag().from_yaml(None)
    with pytest.raises(ValueError, match=r"^are objects and can only be given in code"):
        CallbackObjects().from_yaml(compose("[]", SafeLoader))


@pytest.mark.parametrize(
    ("kind", "value", "mapping"),
    [
        (Schedule(), 4, {0: 4}),
        (Schedule(), {2: 4}, {2: 4}),
        (Schedule(), {}, {}),
        (Compilation(), "blocks", {"blocks": True}),
        (Compilation(), True, {}),
        (StrategyName(), "ddp", {"name": "ddp"}),
        (StrategyName(), StrategyName().normalized("strategy", {"name": "mesh", "tp": 2}), {"name": "mesh", "tp": 2}),
        (StrategyName(), object(), None),
        (WholeNumber(0), 1, None),
    ],
)
def test_a_key_is_set_in_a_mapping_that_says_the_same(kind: Kind, value: Any, mapping: dict[Any, Any] | None) -> None:
    assert kind.as_mapping(value) == mapping


def test_the_mapping_is_a_copy_all_the_way_down() -> None:
    options = {"name": "mesh", "plan": {"up": "colwise"}}
    mapping = StrategyName().as_mapping(StrategyName().normalized("strategy", options))
    assert mapping is not None
    mapping["plan"]["up"] = "rowwise"
    assert options["plan"] == {"up": "colwise"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Word("norm", "value"), ["norm", "VALUE"]),
        (Time(1), ["10 min", Duration("seconds", 2)]),
        (Maximum(none="no clipping"), [None, 0, 1, 0.5]),
        (Recomputation(), [None, True, "full", 2]),
        (Folder(), ["~", Path("a")]),
        (RunName(), [None, "lr=0.1", "ünter 3", "a..b"]),
        (PrecisionName(), ["no", 16, {"name": "fp8", "recipe": "rowwise"}]),
        (Schedule(), [3, {4: 2, 0: 1}]),
    ],
)
def test_a_normal_form_is_its_own_normal_form(kind: Kind, values: list[Any]) -> None:
    for value in values:
        normal = kind.normalized("name", value)
        assert kind.normalized("name", normal) == normal
        assert type(kind.normalized("name", normal)) is type(normal)
