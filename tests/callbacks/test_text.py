"""Names in tables and in HTML: shown, not obeyed."""

from __future__ import annotations

import random

from callbacks.text import Html, element, html_table, rich_table


def test_elements() -> None:
    assert element("p", "<", Html("<br>"), None, ["&", 1], class_='a"b', aria_hidden=True, id=None) == (
        '<p class="a&quot;b" aria-hidden>&lt;<br>&amp;1</p>'
    )
    assert html_table("t", ["a", "b"], [["<", 1]], numbers_from=1).count('class="number"') == 2


def test_a_table_shows_names_as_they_are_and_draws_no_random_numbers() -> None:
    state = random.getstate()
    text = rich_table(["name", "n"], [("[red]a\x1b[2J", 1), ("b\nc", 22)], 60, text_columns=["name"])
    assert [line.split() for line in text.splitlines() if "─" not in line] == [
        ["name", "n"],
        [r"[red]a\x1b[2J", "1"],
        [r"b\nc", "22"],
    ]
    assert random.getstate() == state
