"""Tables as text, and the metrics of an evaluation as one."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from engine import terminal_text

if TYPE_CHECKING:
    from engine import Run

_OF_LOADER = re.compile(r"(.*)/dataloader_idx_(\d+)$", re.DOTALL)


def rich_table(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int, left: Collection[str]) -> str:
    """A table in rich's look, in at most ``width`` columns; whatever its names hold is shown as text.

    Args:
        left: the columns of text; numbers are on the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell(value: object) -> Text:
        return Text(terminal_text(value, one_line=True))

    table = Table(box=box.SIMPLE_HEAD, safe_box=True)
    for head in columns:
        table.add_column(cell(head), justify="left" if head in left else "right")
    for row in rows:
        table.add_row(*map(cell, row))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def results_table(name: str, run: Run, width: int) -> str:
    """The metrics of the evaluation that has just ended, a column a loader, in at most ``width`` columns."""
    rows: dict[str, dict[int, float]] = {}
    loaders = len(run.num_eval_batches)
    for metric, value in run.metrics.items():
        found = _OF_LOADER.match(metric) if loaders > 1 else None
        if found is None:
            rows.setdefault(metric, {})[0 if loaders < 2 else -1] = value
        else:
            rows.setdefault(found[1], {})[int(found[2])] = value
    columns = sorted({column for values in rows.values() for column in values})
    step = f" of step {run.step}" if run.step else ""
    heads = ["all" if c < 0 else f"loader {c}" if loaders > 1 else "value" for c in columns]
    cells = [(metric, *(f"{values[c]:.6g}" if c in values else "" for c in columns)) for metric, values in rows.items()]
    first = f"{name}{step}"
    return rich_table([first, *heads], cells, width, left=[first])
