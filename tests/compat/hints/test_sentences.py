"""Each sentence about a name of another trainer stays as ``sentences.json`` has it, wherever its table is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.utils.extensions import answer

RECORDED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("sentences.json").read_text())
"""What to use instead of a name, by the place that is asked for it. A sentence that changes on purpose changes there too."""


@pytest.mark.parametrize("place", RECORDED)
def test_sentences_are_as_recorded(place: str) -> None:
    assert {name: answer(place, name) for name in RECORDED[place]} == RECORDED[place]
    assert answer(place, "a name that nobody has") == ""
