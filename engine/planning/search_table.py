"""What a search has found, in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.planning.candidates import written
from engine.planning.plan_text import duration, size
from engine.planning.tables import bullets, table, terminal_safe

_MOST = 15
"""Rows of the table of what fits; ``--json`` has all."""


def show(found: Mapping[str, Any], console: Any) -> None:
    """Print a search.

    Args:
        found: of :meth:`engine.planning.search.PlanSearch.as_json`.
        console: of rich.
    """
    from rich.text import Text

    found = terminal_safe(found)
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
    console.print(bullets(found["notes"]))


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
    numbers = ("micro-batch", "window", "needs", "step", "samples/s")
    text = ("strategy", "precision", "recompute")
    made = table(*text, *numbers, left=text, folds=("strategy",), title="What fits, the fastest first")
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
    """A line for each reason; of what is too large, one for each strategy, with the smallest need."""
    text = ("strategy", "precision", "verdict", "tried", "why")
    made = table(*text, left=text, folds=("strategy", "verdict", "why"), title="What does not, or was not planned")
    for group in _grouped(rows):
        shown = min(group, key=lambda each: (each["need_bytes"] is None, each["need_bytes"] or 0))
        made.add_row(
            ", ".join(dict.fromkeys(written(each["strategy"]) for each in group)),
            ", ".join(dict.fromkeys(each["precision"] for each in group)),
            shown["verdict"],
            str(len(group)),
            _why(shown),
        )
    return made


def _why(shown: Mapping[str, Any]) -> str:
    if shown["verdict"] == "slower":
        return "the same with larger micro-batches or less recomputation fits"
    if not shown["need_bytes"]:
        return str(shown["reason"])
    recompute = shown["activation_checkpointing"] or "none"
    return f"micro-batch {shown['micro_batch']}, recompute {recompute}: {shown['reason']}"


def _grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for each in rows:
        key: tuple[str, ...] = (each["verdict"], each["reason"])
        if each["verdict"] == "slower":
            key = ("slower",)
        elif each["verdict"] == "too large":
            key = ("too large", written(each["strategy"]), each["precision"])
        groups.setdefault(key, []).append(each)
    return list(groups.values())
