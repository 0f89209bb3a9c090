"""The drawings are what their script draws, and name classes that are there."""

from __future__ import annotations

import re

import pytest

from tools.drawings import DRAWINGS, PICTURES


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_up_to_date(name: str) -> None:
    drawing = DRAWINGS[name]().svg()
    assert (PICTURES / name).read_text() == drawing, "out of date: python tests/tools/drawings.py"


def test_the_drawing_of_a_run_names_classes() -> None:
    names = re.findall(r'font-weight="600"[^>]*>(\w+)<', DRAWINGS["run.svg"]().svg())
    assert len(names) == 18
    text = "\n".join(path.read_text() for path in (PICTURES.parents[1] / "engine").rglob("*.py"))
    assert [name for name in names if not re.search(rf"^class {name}\b", text, re.MULTILINE)] == []
