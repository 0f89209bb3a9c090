"""The page: one HTML file with its style, its script and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .charts import charts_of
from .markup import Html, element, join
from .runs import RunData, named, runs_in
from .sections import (
    checkpoints,
    configuration,
    curves,
    differences,
    evaluated,
    header,
    results,
    where_the_time_went,
)

MOST_POINTS = 1_000_000
_PLACE = Path(__file__).parent


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    max_points: int = MOST_POINTS,
    only: bool = False,
) -> Path:
    """Write one HTML page about the runs in ``folders``; it opens without network. It compares several runs.

    A folder is a run's own, or a ``root_dir``, which stands for all of its runs. Beside runs that trained, those that only evaluated are rows of
    a table. The runs need to have had ``Report`` or ``CSVLogger`` among their callbacks; they may still be running, or have been killed.

    Args:
        folders: of runs.
        path: the page; ``None``: ``report.html`` in the folder of a single run, and ``comparison.html`` in the first of ``folders`` for several.
        max_points: of all curves; if there are more, long curves keep the lowest and the highest of neighbouring points.
        only: a folder stands for its own run alone.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: a folder has no run.
        ValueError: ``folders`` is empty, or ``max_points`` is below 100.
    """
    if not folders or max_points < 100:
        raise ValueError(
            f"write_report(folders={list(folders)}, max_points={max_points}): give a folder, and at least 100 points"
        )
    found = {run.folder.resolve(): run for folder in folders for run in runs_in(Path(folder), only)}
    runs = list(found.values())
    named(runs)
    evaluations = [run for run in runs if not run.trained]
    runs = [run for run in runs if run.trained] or runs
    if runs == evaluations:
        evaluations = []
    if path is None:
        path = runs[0].folder / "report.html" if len(runs) == 1 else Path(folders[0]) / "comparison.html"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(page(runs, max_points, evaluations), encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def page(runs: Sequence[RunData], max_points: int, evaluations: Sequence[RunData] = ()) -> str:
    """The whole file. ``evaluations``: runs that trained nothing, beside those that did."""
    charts, points = charts_of(runs, max_points)
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    title = f"Training report: {runs[0].name}" if len(runs) == 1 else f"Training report: {len(runs)} runs"
    body = element(
        "main",
        curves(runs, charts),
        None if len(runs) > 1 else results(runs[0]),
        differences(runs),
        evaluated(evaluations),
        where_the_time_went(runs),
        checkpoints(runs),
        configuration(runs),
    )
    parts = {
        "title": join(title),
        "body": join(header(runs, title), body),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": _data({"runs": [run.name for run in runs], "charts": charts}),
        "points": points,
    }
    # One pass: what is put in is not searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_PLACE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(value: Any) -> Html:
    """JSON that cannot end the element that it is in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
