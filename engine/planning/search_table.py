"""What a search has found, in the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

from engine.planning.candidates import written
from engine.planning.plan_text import duration, size

_MOST = 15
"""Rows of the table of what fits; ``--json`` has all."""


def printed(found: Mapping[str, Any], width: int = 140) -> str:
    """The tables as text without colours."""
    from rich.console import Console

    file = io.StringIO()
    show(found, Console(file=file, width=width, color_system=None, legacy_windows=False))
    return file.getvalue().rstrip()


def show(found: Mapping[str, Any], console: Any) -> None:
    """Print a search.

    Args:
        found: of :meth:`engine.planning.search.PlanSearch.as_json`.
        console: of rich.
    """
    from rich.text import Text

    candidates = found["candidates"]
    fits = [each for each in candidates if each["verdict"] == "fits"]
    console.print(
        Text(
            f"{found['world_size']} x {found['device']}, {size(found['memory_bytes'])} each, steps of {found['global_batch']} samples: "
            f"{len(candidates)} candidates, {found['planned']} planned in {duration(found['seconds'])}, {len(fits)} fit",
            style="bold",
        )
    )
    if fits:
        console.print(_fitting(fits))
        for line in _run(fits[0]):
            console.print(Text(line, style="bold green"), soft_wrap=True)
    else:
        console.print(Text(_nothing(candidates, found["memory_bytes"]), style="bold red"), soft_wrap=True)
    if rest := [each for each in candidates if each["verdict"] != "fits"]:
        console.print(_rest(rest))
    for each in found["notes"]:
        console.print(Text(f"  - {each}"))


def _run(candidate: Mapping[str, Any]) -> list[str]:
    """The settings of a candidate, as one types them."""
    commands = [] if candidate["set"] is None else [f"  fit run ... {candidate['set']}"]
    return [
        f"The fastest that fits, with a loader that gives batches of {candidate['micro_batch']} to each rank:",
        *commands,
        f"  {candidate['fit']}",
    ]


def _nothing(candidates: Iterable[Mapping[str, Any]], memory: int) -> str:
    """What comes closest, if nothing fits."""
    planned = [each for each in candidates if each["need_bytes"] is not None]
    if not planned:
        return "Nothing fits."
    least = min(planned, key=lambda each: each["need_bytes"])
    return (
        f"Nothing fits. The closest needs {size(least['need_bytes'])} of {size(memory)}: {least['fit']}, "
        f"micro-batches of {least['micro_batch']}"
    )


def _fitting(rows: list[Mapping[str, Any]]) -> Any:
    made = _table(
        "What fits, the fastest first",
        "strategy",
        "precision",
        "recompute",
        "micro-batch",
        "window",
        "needs",
        "step",
        "samples/s",
    )
    for each in rows[:_MOST]:
        made.add_row(
            written(each["strategy"])
            + (" (by formulas)" if each["computed"] else "")
            + (" (partial)" if each["missing"] else ""),
            each["precision"],
            str(each["activation_checkpointing"] or "none"),
            str(each["micro_batch"]),
            str(each["accumulate_grad_batches"]),
            size(each["need_bytes"]),
            duration(each["step_s"]),
            f"{each['samples_per_second']:.4g}",
        )
    if len(rows) > _MOST:
        made.add_row(f"... and {len(rows) - _MOST} more")
    return made


def _rest(rows: list[Mapping[str, Any]]) -> Any:
    """A line for each reason of a strategy: of what is too large, the smallest need."""
    made = _table("What does not, or was not planned", "strategy", "precision", "verdict", "tried", "why", left=5)
    for group in _grouped(rows):
        shown = min(group, key=lambda each: (each["need_bytes"] is None, each["need_bytes"] or 0))
        which = (
            f"micro-batch {shown['micro_batch']}, recompute {shown['activation_checkpointing'] or 'none'}: "
            if shown["need_bytes"]
            else ""
        )
        made.add_row(
            written(shown["strategy"]), shown["precision"], shown["verdict"], str(len(group)), which + shown["reason"]
        )
    return made


def _grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for each in rows:
        groups.setdefault((written(each["strategy"]), each["precision"], each["verdict"]), []).append(each)
    return list(groups.values())


def _table(name: str, *columns: str, left: int = 3) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return made
