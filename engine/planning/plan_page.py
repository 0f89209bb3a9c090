"""A plan as one HTML page that opens without network: tables, and a timeline of each rank's memory."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.planning.plan_text import (
    CATEGORIES,
    agreeing,
    check_rows,
    count,
    duration,
    need_rows,
    phase_and_module,
    run_rows,
    size,
    time_rows,
    title,
    verdict,
)

_WIDTH, _HEIGHT = 1000.0, 320.0
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none';"
_LEFT, _TOP, _BOTTOM = 84.0, 26.0, 292.0


def page(plan: Mapping[str, Any]) -> str:
    """The page as the text of one HTML file.

    Args:
        plan: the result of :meth:`engine.planning.plan.Plan.as_json`.
    """
    style = Path(__file__).with_name("plan_page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    kind = {"yes": "good", "no": "bad"}.get(plan["verdict"], "fair")
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY} style-src \'sha256-{digest}\'">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta name="generator" content="fit plan"><title>Plan: {_text(title(plan))}</title><style>{style}</style>'
    )
    notes = (("Not traced: the numbers are those of the rest", "missing"), ("Computed by formulas", "computed"))
    body = [
        f'<header><h1>{_text(title(plan))}</h1><p class="verdict {kind}">{_text(verdict(plan))}</p></header><main>',
        *(_list(heading, plan[key]) for heading, key in notes if plan[key]),
        "<h2>Memory</h2>",
        *(_timeline(rank, plan["memory"]["device_bytes"]) for rank in plan["ranks"]),
        _memory(plan),
        *(_module_table(rank) for rank in plan["ranks"] if rank["held_at_peak"]),
        "<h2>Time and communication</h2>",
        _table("One step", (), time_rows(plan)),
        *(_communication(rank) for rank in plan["ranks"] if rank["collectives"]),
        "<h2>The run</h2>",
        _table("Data, checkpoints and cost", (), run_rows(plan)),
        _checks(plan),
        _list("Assumed", plan["assumptions"]),
        "</main>",
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers_from: int | None = None,
    last_is_sum: bool = False,
) -> str:
    """An HTML table that scrolls sideways where it is too wide. The columns from ``numbers_from`` on are aligned as numbers."""

    def kind(index: int) -> str:
        return ' class="number"' if numbers_from is not None and index >= numbers_from else ""

    listed = list(rows)
    head = "".join(f'<th scope="col"{kind(index)}>{_text(name)}</th>' for index, name in enumerate(columns))
    lines = []
    for number, row in enumerate(listed):
        first, *values = row
        cells = "".join(f"<td{kind(index)}>{_text(cell)}</td>" for index, cell in enumerate(values, 1))
        opening = '<tr class="sum">' if last_is_sum and number == len(listed) - 1 else "<tr>"
        lines.append(f'{opening}<th scope="row">{_text(first)}</th>{cells}</tr>')
    header = f"<thead><tr>{head}</tr></thead>" if columns else ""
    name = _text(caption)
    return (
        f'<div class="scroll" role="region" aria-label="{name}" tabindex="0"><table><caption>{name}</caption>{header}'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _list(heading: str, lines: Iterable[str]) -> str:
    return f"<h2>{_text(heading)}</h2><ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _rank_title(rank: Mapping[str, Any]) -> str:
    return f"rank {rank['rank']}{': ' + rank['role'] if rank['role'] else ''}"


def _memory(plan: Mapping[str, Any]) -> str:
    """A table of each rank's memory at the peak, by category."""
    columns = [dict(need_rows(rank["need"], rank["peak"]["memory"])) for rank in plan["ranks"]]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(size(column.get(name, 0)) for column in columns)] for name in names]
    rows.append(["needed", *(size(rank["need"]["total"]) for rank in plan["ranks"])])
    heads = ["", *(_rank_title(rank) for rank in plan["ranks"])]
    device = size(plan["memory"]["device_bytes"])
    return _table(f"At the peak, on a device with {device}", heads, rows, numbers_from=1, last_is_sum=True)


def _module_table(rank: Mapping[str, Any]) -> str:
    rows = [[name or "(outside of modules)", size(value)] for name, value in rank["held_at_peak"].items()]
    return _table(
        f"Held by modules at the peak of {_rank_title(rank)}, which is in: {phase_and_module(rank['peak'])}",
        ("module", "bytes"),
        rows,
        numbers_from=1,
    )


def _communication(rank: Mapping[str, Any]) -> str:
    """A table of a rank's collectives in a step, the slowest first."""
    rows = [
        [
            collective["kind"],
            collective["axis"],
            collective["phase"],
            "yes" if collective["overlaps"] else "no",
            collective["group_size"],
            count(collective["count"]),
            size(collective["bytes"]),
            duration(collective["seconds"]),
        ]
        for collective in sorted(rank["collectives"], key=lambda entry: -entry["seconds"])
    ]
    columns = ("kind", "axis", "phase", "beside the pass", "ranks", "count", "bytes", "time")
    return _table(f"Communication of {_rank_title(rank)} in a step", columns, rows, numbers_from=4)


def _checks(plan: Mapping[str, Any]) -> str:
    rows = check_rows(plan)
    table = (
        _table("Published formulas that differ by more than 20 %", ("", "traced", "formula", "source"), rows)
        if rows
        else ""
    )
    sentence = agreeing(plan)
    return table + (f"<p>{_text(sentence)}</p>" if sentence else "")


def _timeline(rank: Mapping[str, Any], limit: int) -> str:
    """A chart of a rank's memory over the moments of a step, as stacked areas; ``limit``: the device's memory in bytes."""
    moments = rank["timeline"] or [rank["peak"]]
    categories = [key for key in CATEGORIES if any(moment["memory"].get(key) for moment in moments)]
    highest = max(moment["memory"]["total"] for moment in moments) or 1
    top = max(highest, limit if limit < 2 * highest else 0) * 1.05
    parts = [*_grid(top), *_areas(moments, categories, top), *_phases(moments)]
    if limit < 2 * highest:
        parts.append(_line("limit", _LEFT, _y(limit, top), _WIDTH, _y(limit, top)))
        parts.append(
            f'<text x="{_WIDTH - 4:.0f}" y="{_y(limit, top) - 5:.1f}" text-anchor="end">the device has {_text(size(limit))}</text>'
        )
    peak_index = max(range(len(moments)), key=lambda index: moments[index]["memory"]["total"])
    parts.append(_line("peak", _x(peak_index, moments), _y(highest, top), _x(peak_index, moments), _BOTTOM))
    peak = f"peak of {size(highest)}, {phase_and_module(moments[peak_index])}"
    parts.append(_label(_x(peak_index, moments), max(_y(highest, top) - 6, 12), peak))
    name = f"Memory of {_rank_title(rank)} over one step: {peak}"
    keys = "".join(
        f'<li><span class="swatch {_colour(key)}"></span>{_text(CATEGORIES[key])}</li>' for key in categories
    )
    return (
        f'<figure><figcaption>{_text(name)}</figcaption><svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{_text(name)}">'
        f'{"".join(parts)}</svg><ul class="legend">{keys}</ul></figure>'
    )


def _areas(moments: Sequence[Mapping[str, Any]], categories: Sequence[str], top: float) -> list[str]:
    """One polygon for each category, stacked on those before it. ``top``: the number of bytes at the upper edge."""
    floor = [0] * len(moments)
    polygons = []
    for key in categories:
        roof = [low + moment["memory"].get(key, 0) for low, moment in zip(floor, moments, strict=True)]
        points = [f"{x:.1f},{_y(value, top):.1f}" for x, value in _stairs(roof, moments)]
        points += [f"{x:.1f},{_y(value, top):.1f}" for x, value in reversed(list(_stairs(floor, moments)))]
        polygons.append(
            f'<polygon class="{_colour(key)}" points="{" ".join(points)}"><title>{_text(CATEGORIES[key])}</title></polygon>'
        )
        floor = roof
    return polygons


def _stairs(values: Sequence[int], moments: Sequence[Any]) -> Iterable[tuple[float, int]]:
    """The corners of a line of stairs with one horizontal piece for each moment, because memory changes abruptly."""
    half = (_WIDTH - _LEFT) / len(moments) / 2
    for index, value in enumerate(values):
        yield _x(index, moments) - half, value
        yield _x(index, moments) + half, value


def _phases(moments: Sequence[Mapping[str, Any]]) -> list[str]:
    """A vertical line at the start of each phase, and the phase's name where there is room."""
    shapes, first_moment = [], 0
    half = (_WIDTH - _LEFT) / len(moments) / 2
    for phase, group in groupby(moment["phase"] for moment in moments):
        length = len(list(group))
        start = _x(first_moment, moments) - half
        shapes.append(_line("phase", start, _TOP, start, _BOTTOM + 6))
        if length * 2 * half > 7 * len(phase):
            shapes.append(
                f'<text x="{start + length * half:.1f}" y="{_HEIGHT - 10:.0f}" text-anchor="middle">{_text(phase)}</text>'
            )
        first_moment += length
    return shapes


def _grid(top: float) -> list[str]:
    """Five horizontal lines with their numbers of bytes, up to ``top``."""
    shapes = []
    for quarter in range(5):
        value = top * quarter / 4
        shapes.append(_line("grid", _LEFT, _y(value, top), _WIDTH, _y(value, top)))
        shapes.append(
            f'<text x="{_LEFT - 6:.0f}" y="{_y(value, top) + 4:.1f}" text-anchor="end">{_text(size(value))}</text>'
        )
    return shapes


def _label(x: float, y: float, text: str) -> str:
    anchor = "end" if x > (_LEFT + _WIDTH) / 2 else "start"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _x(index: int, moments: Sequence[Any]) -> float:
    return _LEFT + (index + 0.5) * (_WIDTH - _LEFT) / len(moments)


def _y(value: float, top: float) -> float:
    return _BOTTOM - value / top * (_BOTTOM - _TOP)


def _colour(key: str) -> str:
    return f"m{list(CATEGORIES).index(key)}"
