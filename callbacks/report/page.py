"""The page of a report, section by section: one HTML file with its style, its script and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..text import Html, element, html_table, join
from .charts import GROUPS, Chart, charts_of
from .runs import PHASES, RunData, give_names, runs_in

MOST_POINTS = 1_000_000
_FOLDER = Path(__file__).parent
_PLACES = ("root_dir",)
"""Settings whose values may differ between runs that count as equal."""
_GOOD, _BAD = ("completed", "stopped"), ("failed", "no end recorded", "interrupted")


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
    runs_by_folder = {
        run.folder.resolve(): run for folder in folders for run in runs_in(Path(folder).expanduser(), only)
    }
    runs = list(runs_by_folder.values())
    give_names(runs)
    evaluations = [run for run in runs if not run.trained]
    runs = [run for run in runs if run.trained] or runs
    if runs == evaluations:
        evaluations = []
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


def page(runs: Sequence[RunData], max_points: int, evaluations: Sequence[RunData] = ()) -> str:
    """Return the whole page. ``evaluations``: runs that trained nothing, next to the ``runs`` that did."""
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


def header(runs: Sequence[RunData], title: str) -> Html:
    """Return the page's header: title, how the run ended, and its facts; of several runs a table."""
    notes = [element("p", run.note) for run in runs if run.note]
    if len(runs) > 1:
        return element("header", element("h1", title), notes, _overview(runs))
    run = runs[0]
    status = element("p", _status(run), " ", run.reason)
    pairs = [
        element("div", element("dt", name), element("dd", value), class_="wide" if len(value) > 20 else None)
        for name, value in _facts(run).items()
        if value
    ]
    return element("header", element("h1", title), status, notes, element("dl", pairs))


def _status(run: RunData) -> Html:
    kind = "good" if run.status in _GOOD else "bad" if run.status in _BAD else "plain"
    return element("strong", run.status, class_=f"status {kind}")


def _facts(run: RunData) -> dict[str, str]:
    best = next((checkpoint["path"] for checkpoint in run.checkpoints if checkpoint["best"]), "")
    return {
        "steps": f"{run.step:,}",
        "epochs": "" if run.epochs is None else f"{run.epochs:,}",
        "time": duration(run.seconds) if run.seconds else "",
        "started": moment(run.started),
        "resumed": "" if run.starts < 2 else "once" if run.starts == 2 else f"{run.starts - 1} times",
        "best checkpoint": best.rstrip("/").rpartition("/")[2],
        **run.machine,
        "folder": str(run.folder),
    }


def _overview(runs: Sequence[RunData]) -> Html:
    rows: list[list[object]] = [
        [
            run.name,
            _status(run),
            f"{run.step:,}",
            duration(run.seconds) if run.seconds else "",
            element("time", moment(run.started)),
        ]
        for run in runs
    ]
    return html_table("Runs", ["run", "status", "steps", "time", "started"], rows, numbers_from=2)


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


def differences(runs: Sequence[RunData]) -> Html | None:
    """Return the section about what differs between runs: settings, and the last values of metrics."""
    if len(runs) < 2:
        return None
    names = [run.name for run in runs]
    configs = [{name: value for name, value, _ in run.config} for run in runs]
    defaults = {(name, value) for run in runs for name, value, origin in run.config if origin == "default"}
    settings: list[list[object]] = []
    for name in dict.fromkeys(name for config in configs for name in config if name not in _PLACES):
        recorded = [config.get(name) for config in configs if config]
        # A run of an earlier version lacks settings that came later, which had no other value than their default.
        different = {
            value for value in recorded if value is not None and (None not in recorded or (name, value) not in defaults)
        }
        if len(different) > 1 or (different and None in recorded):
            settings.append([name, *(config.get(name, "not set" if config else "not recorded") for config in configs)])
    no_differences = element("p", "The runs have the same configuration.")
    last: list[list[object]] = [
        [name, *(number(float(run.metrics[name].values[-1])) if name in run.metrics else "" for run in runs)]
        for name in sorted({name for run in runs for name in run.metrics})
    ]
    return _section(
        "differences",
        "Differences",
        html_table("Settings that differ", ["setting", *names], settings) if settings else no_differences,
        html_table("Last value of each metric", ["metric", *names], last, numbers_from=1) if last else None,
    )


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
    bars = [_bar(run, len(timed) > 1) for run in timed]
    head: list[object] = ["phase", *(run.name if len(timed) > 1 else "time" for run in timed)]
    return _section("time", "Where the time went", bars, html_table("Time of each phase", head, rows, numbers_from=1))


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
    for run in runs:
        changed_rows: list[list[object]] = [
            [name, _value(value), origin] for name, value, origin in run.config if origin != "default"
        ]
        default_rows: list[list[object]] = [
            [name, _value(value)] for name, value, origin in run.config if origin == "default"
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


def _value(value: str) -> Html:
    return element("code", value)


def _section(name: str, title: str, *children: object) -> Html:
    return element(
        "section", element("h2", title, id=f"{name}-title"), children, id=name, aria_labelledby=f"{name}-title"
    )


def number(value: float) -> str:
    """A number as text with six digits."""
    return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "∞")


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``1 h 02 min``, ``3 min 20 s``, ``4.21 s``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {remainder:02} s"


def moment(seconds: float | None) -> str:
    """Return a time as a date and a time of day in this machine's time zone; empty if it is not valid."""
    try:
        return "" if not seconds else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""
