"""Plans and searches as text: what their tables in the terminal have in common. Imports rich when something is shown."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from engine.utils.text import terminal_text

WIDTH = 140
"""Columns of a file or a pipe, which have no width."""


def console() -> Any:
    """The terminal; a file or a pipe is :data:`WIDTH` wide, unless ``COLUMNS`` says otherwise."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(width=width, markup=False, emoji=False)


def printed(found: dict[str, Any], show: Callable[[Any, Any], None]) -> str:
    """What ``show(found, console)`` prints, as text without colours."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, legacy_windows=False, markup=False, emoji=False)
    show(found, console)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def terminal_safe(value: Any) -> Any:
    """A copy of JSON values whose text a terminal shows and does not obey: names of modules and strategies are the user's."""
    if isinstance(value, dict):
        return {terminal_text(key, one_line=True): terminal_safe(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [terminal_safe(inner) for inner in value]
    return terminal_text(value, one_line=True) if isinstance(value, str) else value


def table(*columns: str, left: Iterable[str] = (), folds: Iterable[str] = (), title: str | None = None) -> Any:
    """A table without rows.

    Args:
        columns: their heads.
        left: those that are text, besides the first; numbers are on the right.
        folds: those that break into several lines where the terminal is narrow; the others keep theirs whole.
        title: above it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_header=any(columns),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if not index or column in left else "right",
            overflow="fold",
            no_wrap=column not in folds,
            min_width=len(column),
        )
    return made


def bullets(lines: Iterable[str]) -> Any:
    """A list, whose long lines continue under their text."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        made.add_row("  -", Text(line))
    return made
