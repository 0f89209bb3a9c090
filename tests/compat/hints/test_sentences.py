"""Each sentence about a name of another trainer stays as ``sentences.json`` has it, wherever its table is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.compat.accelerate import names as accelerate
from engine.compat.lightning import arguments as lightning
from engine.compat.lightning.names import ATTRIBUTES as LIGHTNING
from engine.compat.transformers import arguments as transformers
from engine.utils.extensions import advice

RECORDED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("sentences.json").read_text())
"""What to use instead of a name, by the place that is asked for it. A sentence that changes on purpose changes there too."""


@pytest.mark.parametrize("place", RECORDED)
def test_sentences_are_as_recorded(place: str) -> None:
    assert {name: advice(place, name) for name in RECORDED[place]} == RECORDED[place]
    assert advice(place, "a name that nobody has") == ""


def test_trainers_that_share_a_name_have_one_answer() -> None:
    """The tables are merged, so that one would hide the other."""
    settings = [{"": table.SETTINGS | table.OTHERWISE} for table in (lightning, accelerate, transformers)]
    for tables in (
        settings,
        [LIGHTNING, accelerate.ATTRIBUTES],
        [table.CALLS for table in (lightning, accelerate)],
    ):
        first: dict[tuple[str, str], str] = {}
        for table in tables:
            for place, rows in table.items():
                for name, sentence in rows.items():
                    assert first.setdefault((place, name), sentence) == sentence, f"{place} {name}"
