"""The metrics of an evaluation as a table."""

from __future__ import annotations

import io
import re

from engine import Run

_OF_LOADER = re.compile(r"(.*)/dataloader_idx_(\d+)$", re.DOTALL)


def results_table(name: str, run: Run, width: int) -> str:
    """The metrics of the evaluation that has just ended, a column a loader, in at most ``width`` columns."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

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
    table = Table(f"{name}{step}", box=box.SIMPLE_HEAD, safe_box=True)
    for column in columns:
        table.add_column("all" if column < 0 else f"loader {column}" if loaders > 1 else "value", justify="right")
    for metric, values in rows.items():
        table.add_row(escape(metric), *(f"{values[c]:.6g}" if c in values else "" for c in columns))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")
