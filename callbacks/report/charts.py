"""The charts of a page: which curves share one, their colors, and their points."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .curves import Curve, Packed, share
from .runs import RunData

Chart = dict[str, Any]
"""A chart: ``title``, ``group`` (a key of :data:`GROUPS`), ``unit``, and ``series``. A series has the number of its ``run``, ``name``, ``color`` and
``dash`` (numbers), the places of ``x`` (steps), ``t`` (seconds) and ``y`` among the points, and counts: ``total``, ``odd`` (NaN, infinite)."""
COLORS, DASHES = 8, 4
"""Numbers of colors and of dashes of the page."""
GROUPS = {
    "Metrics": "Metrics",
    **dict.fromkeys(("Learning rate", "Gradient norm", "Throughput", "Memory", "Machine"), "Optimization and machine"),
    "Parameters": "Gradient norm of each parameter",
}
"""Kinds of charts, in their order -> the heading above them."""

_STAGES = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "eval": 1, "test": 2}
_STAGE = re.compile(rf"({'|'.join(_STAGES)})[/_](.+)")
_LOGGED = (
    ("Learning rate", re.compile(r"lr-|(.*/)?(lr|learning_rate)$")),
    ("Parameters", re.compile(r"grad_norm/")),
    ("Gradient norm", re.compile(r".*grad\w*[_/]norm", re.IGNORECASE)),
    ("Throughput", re.compile(r".*(throughput|per_s(ec(ond)?)?\b|/s$|\bmfu\b|flops|goodput)", re.IGNORECASE)),
    ("Memory", re.compile(r".*(memory|\bmem\b|_bytes|allocated|reserved)", re.IGNORECASE)),
    ("Machine", re.compile(r"(device|cpu|gpu|straggler)/")),
)


def charts_of(runs: Sequence[RunData], max_points: int) -> tuple[list[Chart], str]:
    """Return the charts in their order, and all points as one text (:class:`.curves.Packed`)."""
    placed: dict[tuple[str, str, str], list[tuple[int, str, Curve]]] = {}
    twice = _logged_twice(name for run in runs for name in run.metrics)
    for number, run in enumerate(runs):
        for chart, name, curve in _curves_with_charts(run, twice):
            placed.setdefault(chart, []).append((number, name, curve))
    limit = share([curve for series in placed.values() for _, _, curve in series], max_points)
    packed, looks = Packed(), _Looks()
    charts = []
    # Groups in their order; within a group a chart stays where it first appeared.
    for chart in sorted(placed, key=lambda chart: list(GROUPS).index(chart[0])):
        group, title, unit = chart
        look = looks.looks_of(list(dict.fromkeys(name for _, name, _ in placed[chart])))
        series = [
            {"run": number, "name": name, **look[name], **_points(curve, limit, packed)}
            for number, name, curve in placed[chart]
        ]
        charts.append({"title": title, "group": group, "unit": unit, "series": series})
    return charts, packed.text()


class _Looks:
    """Chooses colors and dashes of series: the same for a stage in all charts, and different ones for the names in one chart."""

    def __init__(self) -> None:
        self._others = 0

    def looks_of(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Name of each series of one chart -> its color and dash."""
        looks: dict[str, dict[str, int]] = {}
        stages = {_STAGES[staged[1]] for name in names if (staged := _STAGE.match(name))}
        for name in names:
            staged = _STAGE.match(name)
            if staged and (number := _STAGES[staged[1]]) not in [look["color"] for look in looks.values()]:
                looks[name] = {"color": number, "dash": number}
                continue
            used = {look["color"] for look in looks.values()}
            turn = [(len(set(_STAGES.values())) + self._others + more) % COLORS for more in range(COLORS)]
            dashes = stages | {look["dash"] for look in looks.values()}
            dash = next((dash for dash in range(DASHES) if dash not in dashes), len(looks))
            looks[name] = {"color": next((color for color in turn if color not in used), turn[0]), "dash": dash}
            self._others += 1
        return looks


def _points(curve: Curve, limit: int, packed: Packed) -> dict[str, Any]:
    thin = curve.thinned(limit)
    timed = bool(np.isfinite(thin.seconds).all())
    return {
        "x": packed.add_increasing(thin.steps),
        "t": packed.add(thin.seconds) if timed else None,
        "y": packed.add(thin.values),
        "total": len(curve),
        "odd": int(len(curve) - np.isfinite(curve.values).sum()),
    }


def stage_of(name: str) -> str:
    """Return the stage that the name of a logged value begins with: ``"train"``, ``"val"`` or ``"test"``; empty: none."""
    staged = _STAGE.match(name)
    return ("train", "val", "test")[_STAGES[staged[1]]] if staged else ""


def _logged_twice(names: Iterable[str]) -> set[str]:
    """Return the names of values that were logged with ``on_step`` and ``on_epoch``, as ``name_step`` and ``name_epoch``."""
    all_names = set(names)
    return {name[:-5] for name in all_names if name.endswith("_step") and f"{name[:-5]}_epoch" in all_names}


def _curves_with_charts(run: RunData, twice: Collection[str]) -> list[tuple[tuple[str, str, str], str, Curve]]:
    """Chart (group, title, unit), name and curve of each curve of a run. ``twice``: names of :func:`_logged_twice`."""
    placed = []
    for name, curve in run.metrics.items():
        whole = re.sub(r"_(step|epoch)$", "", name)
        placed.append((_chart_of(whole if whole in twice else name), name, curve))
    if not any(place[0] == "Learning rate" for place, _, _ in placed):
        placed += _under_chart(run.rates, ("Learning rate", "learning rate", ""))
    for name, curve in run.speed.items():
        placed.append((("Throughput", name, ""), name, curve))
    return placed + _under_chart(run.memory, ("Memory", "memory", "bytes"))


def _under_chart(
    group: Mapping[str, Curve], chart: tuple[str, str, str]
) -> list[tuple[tuple[str, str, str], str, Curve]]:
    return [(chart, name, curve) for name, curve in group.items()]


def _chart_of(name: str) -> tuple[str, str, str]:
    """Return the chart of a logged value (group, title, unit): ``train/loss`` and ``val/loss`` share one."""
    for group, pattern in _LOGGED:
        if pattern.match(name):
            if group == "Learning rate" and not name.endswith(("-momentum", "-weight_decay")):
                return group, "learning rate", ""
            return group, name, "bytes" if name.endswith("_bytes") else ""
    staged = _STAGE.fullmatch(name)
    return "Metrics", staged[2] if staged else name, ""
