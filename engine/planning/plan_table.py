"""A plan in the terminal."""

from __future__ import annotations

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
from engine.planning.tables import bullets, table, terminal_safe

_MOST = 8
"""Rows of a table of modules."""


def show(plan: Mapping[str, Any], console: Any) -> None:
    """Print a plan.

    Args:
        plan: of :meth:`engine.planning.plan.Plan.as_json`.
        console: of rich.
    """
    from rich.text import Text

    plan = terminal_safe(plan)
    style = {"yes": "bold green", "no": "bold red"}.get(plan["verdict"], "bold yellow")
    console.print(Text(title(plan), style="bold"))
    console.print(Text(verdict(plan), style=style))
    for line in (*plan["missing"], *plan["computed"]):
        console.print(Text(f"partial: {line}" if line in plan["missing"] else f"computed: {line}", style="yellow"))
    _print(console, *_memory(plan))
    worst = next(each for each in plan["ranks"] if each["rank"] == plan["worst_rank"])
    console.print(Text(f"The peak of rank {worst['rank']} is in: {place(worst['peak'])}."))
    if worst["held_at_peak"]:
        _print(console, *_held(worst["held_at_peak"]))
    _print(console, *_pairs("One step", time_rows(plan)))
    if any(rank["collectives"] for rank in plan["ranks"]):
        _print(console, *_sent(plan))
    _print(console, *_pairs("The run", run_rows(plan)))
    if rows := check_rows(plan):
        _print(console, *_checks(rows))
    if said := agreeing(plan):
        console.print(Text(said))
    console.print(Text("Assumed:", style="bold"))
    console.print(bullets(plan["assumptions"]))


def _print(console: Any, heading: str, rows: Any) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(heading, style="bold"))
    console.print(rows)


def _pairs(heading: str, rows: list[tuple[str, str]]) -> tuple[str, Any]:
    made = table("", "", left=("",), folds=("",))
    for row in rows:
        made.add_row(*row)
    return heading, made


def _memory(plan: Mapping[str, Any]) -> tuple[str, Any]:
    ranks = plan["ranks"]
    named = [f"rank {each['rank']}{': ' + each['role'] if each['role'] else ''}" for each in ranks]
    made = table("", *named)
    columns = [dict(need_rows(each["need"], each["peak"]["memory"])) for each in ranks]
    for row in dict.fromkeys(name for column in columns for name in column):
        made.add_row(row, *(size(column.get(row, 0)) for column in columns))
    made.add_row("needed", *(size(each["need"]["total"]) for each in ranks), style="bold")
    made.add_row("the device has", *(size(plan["memory"]["device_bytes"]) for _ in ranks))
    return "Memory at the peak", made


def _held(held: Mapping[str, int]) -> tuple[str, Any]:
    made = table("module", "bytes", folds=("module",))
    for name, value in list(held.items())[:_MOST]:
        made.add_row(name or "(outside of modules)", size(value))
    return "Held by modules at the peak", made


def _sent(plan: Mapping[str, Any]) -> tuple[str, Any]:
    """Of the rank that sets the pace; the others send alike. The title has the ranks of each axis."""
    slowest = max(plan["ranks"], key=lambda each: each["step_s"])
    text = ("axis", "phase", "overlaps")
    made = table("kind", *text, "count", "bytes", "time", left=text, folds=("phase",))
    for each in sorted(slowest["collectives"], key=lambda one: -one["seconds"]):
        made.add_row(
            each["kind"],
            each["axis"],
            each["phase"],
            "yes" if each["overlaps"] else "no",
            count(each["count"]),
            size(each["bytes"]),
            duration(each["seconds"]),
        )
    return f"Communication of rank {slowest['rank']} in a step", made


def _checks(rows: list[tuple[str, str, str, str]]) -> tuple[str, Any]:
    made = table("", "traced", "formula", "source", left=("source",), folds=("source",))
    for row in rows:
        made.add_row(*row)
    return "Published formulas that differ from the trace by more than 20 %", made
