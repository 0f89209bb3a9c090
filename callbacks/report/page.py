"""The page of a report, section by section: one HTML file with its style, its script and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..text import Html, element, html_table, join
from .charts import GROUPS, Chart, charts_of
from .page_text import duration, moment, number, run_status
from .run_table import differing_settings, run_table
from .runs import PHASES, RunData, read_runs

MOST_POINTS = 1_000_000
_FOLDER = Path(__file__).parent
_SIDE_BY_SIDE = 12
"""Largest number of runs that stand beside each other in a table; more are rows."""


def write_report(
    folders: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str] | None = None,
    *,
    max_points: int = MOST_POINTS,
    only: bool = False,
) -> Path:
    """Write one HTML page about the runs in ``folders``, which opens without network; several runs are compared.

    A folder is a run's own, or a ``root_dir``, which stands for all of its runs. Next to runs that trained, runs that only evaluated are rows of
    a table. The runs need ``Report`` or ``CSVLogger`` among their callbacks; they may still be running, or have been killed.

    Args:
        folders: folders of runs.
        path: the path of the page; ``None``: ``report.html`` in the folder of a single run, or ``comparison.html`` in the first of several
            ``folders``.
        max_points: largest number of points of all curves; beyond it, long curves keep the lowest and the highest of neighbouring points.
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
    runs, evaluations = read_runs(folders, only)
    if path is None:
        path = runs[0].folder / "report.html" if len(runs) == 1 else Path(folders[0]) / "comparison.html"
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(page(runs, max_points, evaluations), encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def page(runs: Sequence[RunData], max_points: int, evaluations: Sequence[RunData] = (), live: str = "") -> str:
    """Return the whole page.

    Args:
        evaluations: runs that trained nothing, next to the ``runs`` that did.
        live: version of the files, if a server gives the page, which then asks for newer ones; empty: the page is a file.
    """
    charts, points = charts_of(runs, max_points)
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    title = f"Training report: {runs[0].name}" if len(runs) == 1 else f"Training report: {len(runs)} runs"
    body = element(
        "main",
        curves(runs, charts),
        None if len(runs) > 1 else results(runs[0]),
        stages(runs),
        tables_of(runs),
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
        "data": _data(
            {
                "runs": [run.name for run in runs],
                "labels": _labels(runs),
                "live": live,
                "charts": charts,
                "stages": _stages(runs),
            }
        ),
        "connect": " connect-src 'self';" if live else "",
        "points": points,
    }
    # One pass: the texts that are put in are not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(value: Any) -> Html:
    """Return ``value`` as JSON that cannot end the element around it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _labels(runs: Sequence[RunData]) -> list[str]:
    """Return the runs' names for legends, without the folder that all of them share."""
    names = [run.name for run in runs]
    shared = names[0].partition("/")[0]
    if any(name.partition("/")[0] != shared for name in names):
        return names
    return [name.partition("/")[2] or name for name in names]


def _stages(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the stages that the charts mark: number of the run, step, seconds (``None``: not known) and text."""
    return [
        {
            "run": number,
            "x": stage.step,
            "t": stage.seconds if math.isfinite(stage.seconds) else None,
            "text": f"{stage.kind} {stage.text}",
        }
        for number, run in enumerate(runs)
        for stage in run.stages
    ]


def header(runs: Sequence[RunData], title: str) -> Html:
    """Return the page's header: title, how the run ended, and its facts; of several runs a table."""
    notes = [element("p", run.note) for run in runs if run.note]
    if len(runs) > 1:
        return element("header", element("h1", title), notes, run_table(runs))
    run = runs[0]
    status = element("p", run_status(run), " ", run.reason)
    pairs = [
        element("div", element("dt", name), element("dd", value), class_="wide" if len(value) > 20 else None)
        for name, value in _facts(run).items()
        if value
    ]
    return element("header", element("h1", title), status, notes, element("dl", pairs))


def _facts(run: RunData) -> dict[str, str]:
    best = next((checkpoint["path"] for checkpoint in run.checkpoints if checkpoint["best"]), "")
    return {
        "steps": f"{run.step:,}",
        "epochs": "" if run.epochs is None else f"{run.epochs:,}",
        "training time": duration(run.training_s) if run.training_s else "",
        "started": moment(run.started),
        "resumed": "" if run.starts < 2 else "once" if run.starts == 2 else f"{run.starts - 1} times",
        "best checkpoint": best.rstrip("/").rpartition("/")[2],
        **run.machine,
        "folder": str(run.folder),
    }


def curves(runs: Sequence[RunData], charts: Sequence[Chart]) -> Html:
    """Return the section with the places of the charts, which the script draws."""
    if not charts:
        return _section("curves", "Curves", element("p", "No values were logged."))
    note = "The curves are drawn by a script, which your browser does not run. All other parts of this page are below."
    if len(runs) > 1:
        note += " The last values of all metrics are in a table."
    places = []
    for heading in dict.fromkeys(GROUPS.values()):
        numbers = [number for number, chart in enumerate(charts) if GROUPS[chart["group"]] == heading]
        if numbers:
            grid = element("div", [element("figure", data_chart=number) for number in numbers], class_="grid")
            places.append(element("section", element("h3", heading), grid, class_="group"))
    return _section("curves", "Curves", element("noscript", element("p", note)), element("div", id="controls"), places)


def results(run: RunData) -> Html | None:
    """Return the section with the last, lowest and highest values of one run's metrics."""
    rows: list[list[object]] = []
    for name, curve in sorted(run.metrics.items()):
        steps, values = curve.finite()
        cells: list[object] = [name, number(float(curve.values[-1]))]
        if len(values):
            for index in (int(values.argmin()), int(values.argmax())):
                cells += [number(float(values[index])), f"{int(steps[index]):,}"]
        rows.append([*cells, *[""] * (6 - len(cells))])
    if not rows:
        return None
    head: list[object] = ["metric", "last", "lowest", "at step", "highest", "at step"]
    return _section("results", "Results", html_table("Values of each metric", head, rows, numbers_from=1))


def tables_of(runs: Sequence[RunData]) -> Html | None:
    """Return the section with the tables that callbacks have made."""
    tables = []
    for run in runs:
        for name, (columns, rows) in run.tables.items():
            title = f"{name} of {run.name}" if len(runs) > 1 else name
            cells: list[list[object]] = [[_cell(value) for value in row] for row in rows]
            tables.append(html_table(title, list(columns), cells, numbers_from=1))
    return _section("tables", "Tables", *tables) if tables else None


def stages(runs: Sequence[RunData]) -> Html | None:
    """Return the section with the stages of batch size, row length and mixture that have begun."""
    rows: list[list[object]] = [
        [*([run.name] if len(runs) > 1 else []), f"{stage.step:,}", stage.kind, stage.text]
        for run in runs
        for stage in run.stages
    ]
    if not rows:
        return None
    head: list[object] = [*(["run"] if len(runs) > 1 else []), "after step", "stage", "from here on"]
    return _section("stages", "Stages", html_table("Stages of the training", head, rows))


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def differences(runs: Sequence[RunData]) -> Html | None:
    """Return the section about what differs between runs: settings, and the last values of metrics."""
    if len(runs) < 2:
        return None
    names = [run.name for run in runs]
    settings: list[list[object]] = [
        [
            name,
            *(
                ("not set" if run.config else "not recorded") if value is None else value
                for run, value in zip(runs, values, strict=True)
            ),
        ]
        for name, values in differing_settings(runs)
        if len(runs) <= _SIDE_BY_SIDE  # of more runs the table at the top has them
    ]
    above = len(runs) > _SIDE_BY_SIDE
    no_differences = None if above else element("p", "The runs have the same configuration.")
    last: list[list[object]] = [
        [name, *(number(float(run.metrics[name].values[-1])) if name in run.metrics else "" for run in runs)]
        for name in sorted({name for run in runs for name in run.metrics})
    ]
    return _section(
        "differences",
        "Differences",
        html_table("Settings that differ", ["setting", *names], settings) if settings else no_differences,
        _table_of_runs("Last value of each metric", ["metric", *names], last, numbers_from=1) if last else None,
    )


def _table_of_runs(
    caption: str, head: list[object], rows: list[list[object]], *, numbers_from: int | None = None
) -> Html:
    """Return a table with a column for each run; if they are many, with a row for each run."""
    if len(head) - 1 > _SIDE_BY_SIDE:
        head, *rows = (list(cells) for cells in zip(head, *rows, strict=True))
        head[0] = "run"
    return html_table(caption, head, rows, numbers_from=numbers_from)


def evaluated(runs: Sequence[RunData]) -> Html | None:
    """Return the section with the values of runs that only evaluated."""
    rows: list[list[object]] = [
        [run.name, name, number(float(curve.values[-1])), f"{int(curve.steps[-1]):,}", element("code", str(run.folder))]
        for run in runs
        for name, curve in sorted(run.metrics.items())
    ]
    head: list[object] = ["evaluation", "metric", "value", "at step", "folder"]
    return _section("evaluations", "Evaluations", html_table("Values of each evaluation", head, rows)) if rows else None


def where_the_time_went(runs: Sequence[RunData]) -> Html | None:
    """Return the section with a bar and a table of each run's seconds."""
    timed = [run for run in runs if sum(run.times.values()) > 0]
    if not timed:
        return None
    rows: list[list[object]] = []
    for phase, text in PHASES.items():
        if any(run.times.get(phase, 0.0) > 0 for run in timed):
            cells = [f"{duration(run.times.get(phase, 0.0))} ({_share_of_time(run, phase):.0%})" for run in timed]
            rows.append([element("span", "", class_=f"key {phase}"), *cells])
            rows[-1][0] = Html(f"{rows[-1][0]}{element('span', text)}")
    rows.append(["in all", *(duration(sum(run.times.values())) for run in timed)])
    bars = [_bar(run, len(timed) > 1) for run in timed] if len(timed) <= _SIDE_BY_SIDE else []
    head: list[object] = ["phase", *(run.name if len(timed) > 1 else "time" for run in timed)]
    table = _table_of_runs("Time of each phase", head, rows, numbers_from=1)
    return _section("time", "Where the time went", bars, table)


def _share_of_time(run: RunData, phase: str) -> float:
    return run.times.get(phase, 0.0) / sum(run.times.values())


def _bar(run: RunData, titled: bool) -> Html:
    """Draw one horizontal bar. The table has its numbers, so screen readers skip it."""
    start, pieces = 0.0, []
    for phase in PHASES:
        width = 1000 * _share_of_time(run, phase)
        if width > 0:
            pieces.append(element("rect", x=f"{start:.2f}", y=0, width=f"{width:.2f}", height=10, class_=phase))
            start += width
    drawn = element("svg", pieces, viewBox="0 0 1000 10", preserveAspectRatio="none", aria_hidden="true", class_="bar")
    return Html(f"{element('p', run.name) if titled else ''}{drawn}")


def checkpoints(runs: Sequence[RunData]) -> Html | None:
    """Return the section with the checkpoints that exist."""
    rows: list[list[object]] = []
    shows_weights = any(checkpoint["weights"] not in ("", "trained") for run in runs for checkpoint in run.checkpoints)
    for run in runs:
        for checkpoint in run.checkpoints:
            name = checkpoint["path"].rstrip("/").rpartition("/")[2]
            cells: list[object] = [name, *([run.name] if len(runs) > 1 else [])]
            cells += [
                "" if checkpoint["step"] is None else f"{checkpoint['step']:,}",
                element("time", moment(checkpoint["time"])),
            ]
            cells += [
                "" if checkpoint["score"] is None else number(checkpoint["score"]),
                "best" if checkpoint["best"] else "",
            ]
            cells += [checkpoint["weights"]] if shows_weights else []
            rows.append([*cells, element("code", checkpoint["path"])])
    if not rows:
        return None
    head: list[object] = ["checkpoint", *(["run"] if len(runs) > 1 else []), "step", "saved", "score", "best"]
    head += [*(["weights"] if shows_weights else []), "path"]
    return _section("checkpoints", "Checkpoints", html_table("Checkpoints that were kept", head, rows))


def configuration(runs: Sequence[RunData]) -> Html | None:
    """Return the section with all settings and their origins; defaults are folded away."""
    parts: list[object] = []
    shared = _shared_defaults(runs) if len(runs) > _SIDE_BY_SIDE else {}
    if shared:
        rows: list[list[object]] = [[name, _value(value)] for name, value in shared.items()]
        summary = element("summary", f"{len(shared)} settings have their defaults in all runs")
        parts.append(element("details", summary, html_table("Defaults in all runs", ["setting", "value"], rows)))
    for run in runs:
        changed_rows: list[list[object]] = [
            [name, _value(value), origin] for name, value, origin in run.config if origin != "default"
        ]
        default_rows: list[list[object]] = [
            [name, _value(value)]
            for name, value, origin in run.config
            if origin == "default" and shared.get(name) != value
        ]
        title = f"Settings of {run.name}" if len(runs) > 1 else "Settings"
        tables = [html_table(title, ["setting", "value", "from"], changed_rows)] if changed_rows else []
        if default_rows:
            table = html_table(f"{title}: defaults", ["setting", "value"], default_rows)
            tables.append(
                element("details", element("summary", f"{len(default_rows)} settings have their defaults"), table)
            )
        if tables and len(runs) > 1:
            parts.append(element("details", element("summary", title), tables))
        else:
            parts += tables
    return _section("configuration", "Configuration", parts) if parts else None


def _shared_defaults(runs: Sequence[RunData]) -> dict[str, str]:
    """Return the settings that have the same default in all runs, by name."""
    defaults = [{(name, value) for name, value, origin in run.config if origin == "default"} for run in runs]
    return dict(sorted(set.intersection(*defaults)))


def _value(value: str) -> Html:
    return element("code", value)


def _section(name: str, title: str, *children: object) -> Html:
    return element(
        "section", element("h2", title, id=f"{name}-title"), children, id=name, aria_labelledby=f"{name}-title"
    )
