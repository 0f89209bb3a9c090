"""The table of transformers' names has fields of ``TrainingArguments``, with sentences about what there is."""

from __future__ import annotations

import dataclasses
import re

from transformers import TrainingArguments

import callbacks
from engine.compat.transformers.arguments import ARGUMENTS, NONE


def test_defaults_ask_for_nothing() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    factories = {field.name for field in dataclasses.fields(TrainingArguments) if field.default is dataclasses.MISSING}
    rows = {name: row for name, row in ARGUMENTS.items() if name in defaults and name not in factories and row.in_file}
    assert len(rows) > 40
    noted = [name for name, row in rows.items() if defaults[name] not in (*NONE, -1, row.usual)]
    assert noted == []


def test_callbacks_that_sentences_name_are_there() -> None:
    sentences = " ".join(f"{row.instead} {row.in_file}" for row in ARGUMENTS.values())
    names = set(re.findall(r"callbacks\.(\w+)", sentences))
    assert names
    assert [name for name in names if not hasattr(callbacks, name)] == []
