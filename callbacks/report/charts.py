"""Which curves share a chart, and their points for the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .curves import Curve, Packed, share
from .runs import RunData

Chart = dict[str, Any]
"""``title``, ``group`` (a key of :data:`GROUPS`), ``unit``, and ``series``: the number of their ``run``, ``name``, ``color`` and ``dash``
(numbers), where ``x`` (steps), ``t`` (seconds) and ``y`` are among the points, ``total`` points, ``odd`` (NaN and infinite ones)."""
COLORS = 8
"""The number of colors that the page has."""
GROUPS = {
    "Metrics": "Metrics",
    **dict.fromkeys(("Learning rate", "Gradient norm", "Throughput", "Memory", "Machine"), "Optimization and machine"),
    "Parameters": "Gradient norm of each parameter",
}
"""Kinds of charts, in their order, and the headings above them."""

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
    """The charts in their order, and all points as one text (:class:`.curves.Packed`)."""
    placed: dict[tuple[str, str, str], list[tuple[int, str, Curve]]] = {}
    for number, run in enumerate(runs):
        for place, name, curve in _places(run):
            placed.setdefault(place, []).append((number, name, curve))
    limit = share([curve for series in placed.values() for _, _, curve in series], max_points)
    packed, looks = Packed(), _Looks()
    charts = []
    # Groups in their order; within a group a chart stays where it first appeared.
    for place in sorted(placed, key=lambda place: list(GROUPS).index(place[0])):
        group, title, unit = place
        look = looks.of(list(dict.fromkeys(name for _, name, _ in placed[place])))
        series = [
            {"run": number, "name": name, **look[name], **_points(curve, limit, packed)}
            for number, name, curve in placed[place]
        ]
        charts.append({"title": title, "group": group, "unit": unit, "series": series})
    return charts, packed.text()


class _Looks:
    """Colors and dashes of series: one for each stage in all charts, and different ones for the names of one chart."""

    def __init__(self) -> None:
        self._others = 0

    def of(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """The look of the series of one chart."""
        looks: dict[str, dict[str, int]] = {}
        for name in names:
            staged = _STAGE.match(name)
            if staged and (number := _STAGES[staged[1]]) not in [look["color"] for look in looks.values()]:
                looks[name] = {"color": number, "dash": number}
                continue
            used = {look["color"] for look in looks.values()}
            turn = [(len(set(_STAGES.values())) + self._others + more) % COLORS for more in range(COLORS)]
            looks[name] = {"color": next((color for color in turn if color not in used), turn[0]), "dash": len(looks)}
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


def _places(run: RunData) -> list[tuple[tuple[str, str, str], str, Curve]]:
    """Chart (group, title, unit), name and curve."""
    found = [(_place(name), name, curve) for name, curve in run.metrics.items()]
    if not any(place[0] == "Learning rate" for place, _, _ in found):
        found += _named(run.rates, ("Learning rate", "learning rate", ""))
    for name, curve in run.speed.items():
        found.append((("Throughput", name, ""), name, curve))
    return found + _named(run.memory, ("Memory", "memory", "bytes"))


def _named(group: Mapping[str, Curve], place: tuple[str, str, str]) -> list[tuple[tuple[str, str, str], str, Curve]]:
    return [(place, name, curve) for name, curve in group.items()]


def _place(name: str) -> tuple[str, str, str]:
    """The chart of a logged value: ``train/loss`` and ``val/loss`` share one."""
    for group, pattern in _LOGGED:
        if pattern.match(name):
            if group == "Learning rate" and not name.endswith(("-momentum", "-weight_decay")):
                return group, "learning rate", ""
            return group, name, "bytes" if name.endswith("_bytes") else ""
    staged = _STAGE.fullmatch(name)
    return "Metrics", staged[2] if staged else name, ""
