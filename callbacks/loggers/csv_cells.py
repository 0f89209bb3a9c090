"""Texts as cells of a CSV file that a spreadsheet shows, and does not calculate. Imports no torch."""

from __future__ import annotations

import re

_FORMULA = r"=+\-@\uff1d\uff0b\uff0d\uff20\t\r\n"
"""First characters of a cell that a spreadsheet takes for a formula, also after characters that it may take for a cell's end (``;``, tabs)."""
_RISKY = re.compile(rf"""(^|[;\t\r\n])(?=["'{_FORMULA}])""")
_MARKED = re.compile(rf"""(^|[;\t\r\n])'(?=["'{_FORMULA}])""")


def to_cell(text: str) -> str:
    """Return ``text`` as a cell that a spreadsheet shows, and does not calculate. Source: OWASP, CSV Injection."""
    return _RISKY.sub(r"\1'", text)


def from_cell(cell: str) -> str:
    """Return the text of a cell of :func:`to_cell`."""
    return _MARKED.sub(r"\1", cell)
