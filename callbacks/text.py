"""Tables for terminals and HTML with names in them, which are shown as text: no terminal obeys them, and no browser reads them as markup.

:func:`engine.terminal_text` does so for single lines.
"""

from __future__ import annotations

import html
import io
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine import terminal_text

if TYPE_CHECKING:
    from engine import Run

_OF_LOADER = re.compile(r"(.*)/dataloader_idx_(\d+)$", re.DOTALL)
_VOID = ("br", "input", "meta")


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore the state of Python's random numbers after the block. The first import of ``rich`` draws some, which would change the training."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@keep_random_state()
def rich_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], width: int, text_columns: Collection[str]
) -> str:
    """A table in rich's look, at most ``width`` columns wide. Control characters and markup in its cells are shown as text.

    Args:
        text_columns: columns that are aligned to the left; numbers are on the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell(value: object) -> Text:
        return Text(terminal_text(value, one_line=True))

    table = Table(box=box.SIMPLE_HEAD, safe_box=True)
    for head in columns:
        table.add_column(cell(head), justify="left" if head in text_columns else "right")
    for row in rows:
        table.add_row(*map(cell, row))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def results_table(name: str, run: Run, width: int) -> str:
    """A table of the metrics of the latest evaluation, with a column for each loader, at most ``width`` columns wide."""
    rows: dict[str, dict[int, float]] = {}
    loaders = len(run.num_eval_batches)
    for metric, value in run.metrics.items():
        match = _OF_LOADER.match(metric) if loaders > 1 else None
        if match is None:
            rows.setdefault(metric, {})[0 if loaders < 2 else -1] = value
        else:
            rows.setdefault(match[1], {})[int(match[2])] = value
    columns = sorted({column for values in rows.values() for column in values})
    step = f" of step {run.step}" if run.step else ""
    heads = ["all" if c < 0 else f"loader {c}" if loaders > 1 else "value" for c in columns]
    cells = [(metric, *(f"{values[c]:.6g}" if c in values else "" for c in columns)) for metric, values in rows.items()]
    first = f"{name}{step}"
    return rich_table([first, *heads], cells, width, text_columns=[first])


class Html(str):
    """Text that is HTML already. Any other text is escaped when it becomes part of an element."""


def element(tag: str, *children: object, **attributes: str | int | bool | None) -> Html:
    """An element as text: ``<tag attribute="...">children</tag>``.

    Args:
        children: :class:`Html`, other text, or lists of either; ``None`` is left out.
        attributes: ``class_`` is ``class``, other underscores are hyphens; ``True`` has no value, ``False`` and ``None`` are left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    opening = "".join(
        f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
        for name, value in named.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{opening}>" if tag in _VOID else f"<{tag}{opening}>{join(*children)}</{tag}>")


def join(*children: object) -> Html:
    """The children of an element as one text."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None:
            parts.append(child if isinstance(child, Html) else html.escape(str(child)))
    return Html("".join(parts))


def html_table(caption: str, head: list[object], rows: list[list[object]], *, numbers_from: int | None = None) -> Html:
    """An HTML table, which scrolls sideways if it is too wide.

    Args:
        caption: the table's title.
        head: the columns' names.
        rows: cells; the first cell is the row's name.
        numbers_from: index of the first column with numbers, which are aligned to the right.
    """

    def kind(index: int) -> str | None:
        return "number" if numbers_from is not None and index >= numbers_from else None

    columns = [element("th", cell, scope="col", class_=kind(index)) for index, cell in enumerate(head)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_=kind(index)) for index, cell in enumerate(row) if index],
        )
        for row in rows
    ]
    inner = element(
        "table", element("caption", caption), element("thead", element("tr", columns)), element("tbody", body)
    )
    return element("div", inner, class_="scroll", role="region", aria_label=caption, tabindex=0)
