"""A plan in the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from engine.planning.plan_text import (
    agreeing,
    check_rows,
    count,
    duration,
    need_rows,
    place,
    run_rows,
    size,
    time_rows,
    title,
    verdict,
)

_MOST = 8
"""Rows of a table of modules."""


def printed(plan: Mapping[str, Any], width: int = 140) -> str:
    """The tables as text without colours."""
    from rich.console import Console

    file = io.StringIO()
    show(plan, Console(file=file, width=width, color_system=None, legacy_windows=False))
    return file.getvalue().rstrip()


def show(plan: Mapping[str, Any], console: Any) -> None:
    """Print a plan.

    Args:
        plan: of :meth:`engine.planning.plan.Plan.as_json`.
        console: of rich.
    """
    from rich.text import Text

    style = {"yes": "bold green", "no": "bold red"}.get(plan["verdict"], "bold yellow")
    console.print(Text(title(plan), style="bold"))
    console.print(Text(verdict(plan), style=style))
    for line in (*plan["missing"], *plan["computed"]):
        console.print(Text(f"partial: {line}" if line in plan["missing"] else f"computed: {line}", style="yellow"))
    console.print(_memory(plan))
    worst = next(each for each in plan["ranks"] if each["rank"] == plan["worst_rank"])
    console.print(Text(f"The peak of rank {worst['rank']} is in: {place(worst['peak'])}."))
    if worst["held_at_peak"]:
        console.print(_held(worst["held_at_peak"]))
    console.print(_pairs("One step", time_rows(plan)))
    if any(rank["collectives"] for rank in plan["ranks"]):
        console.print(_sent(plan))
    console.print(_pairs("The run", run_rows(plan)))
    if rows := check_rows(plan):
        console.print(_checks(rows))
    for line in filter(None, [agreeing(plan)]):
        console.print(Text(line))
    console.print(Text("Assumed:", style="bold"))
    for line in plan["assumptions"]:
        console.print(Text(f"  - {line}"))


def _table(name: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index and column not in ("", "axis", "phase", "source") else "left")
    return made


def _pairs(name: str, rows: list[tuple[str, str]]) -> Any:
    made = _table(name, "", "")
    made.show_header = False
    for row in rows:
        made.add_row(*row)
    return made


def _memory(plan: Mapping[str, Any]) -> Any:
    ranks = plan["ranks"]
    named = [f"rank {each['rank']}{': ' + each['role'] if each['role'] else ''}" for each in ranks]
    made = _table("Memory at the peak", "", *named)
    columns = [dict(need_rows(each["need"], each["peak"]["memory"])) for each in ranks]
    for row in dict.fromkeys(name for column in columns for name in column):
        made.add_row(row, *(size(column.get(row, 0)) for column in columns))
    made.add_row("needed", *(size(each["need"]["total"]) for each in ranks), style="bold")
    made.add_row("the device has", *(size(plan["memory"]["device_bytes"]) for _ in ranks))
    return made


def _held(held: Mapping[str, int]) -> Any:
    made = _table("Held by modules at the peak", "", "bytes")
    for name, value in list(held.items())[:_MOST]:
        made.add_row(name or "(outside of modules)", size(value))
    return made


def _sent(plan: Mapping[str, Any]) -> Any:
    """Of the rank that sets the pace; the others send alike."""
    slowest = max(plan["ranks"], key=lambda each: each["step_s"])
    made = _table(
        f"Communication of rank {slowest['rank']} in a step",
        "kind",
        "axis",
        "phase",
        "ranks",
        "count",
        "bytes",
        "time",
        "beside the pass",
    )
    for each in sorted(slowest["collectives"], key=lambda one: -one["seconds"]):
        made.add_row(
            each["kind"],
            each["axis"],
            each["phase"],
            str(each["group_size"]),
            count(each["count"]),
            size(each["bytes"]),
            duration(each["seconds"]),
            "yes" if each["overlaps"] else "no",
        )
    return made


def _checks(rows: list[tuple[str, str, str, str]]) -> Any:
    made = _table("Published formulas that differ from the trace by more than 20 %", "", "traced", "formula", "source")
    for row in rows:
        made.add_row(*row)
    return made
