"""The table of runs: a row for each run, with what differs between them, as a part of the page and as a CSV file."""

from __future__ import annotations

import base64
import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..loggers.csv_cells import to_cell
from ..text import Html, element
from .charts import stage_of
from .page_text import duration, moment, number, run_status
from .runs import RunData, read_runs

PLACES = ("root_dir", "name")
"""Settings whose values may differ between runs that count as equal."""
_FIXED = ("run", "status", "steps", "training time", "started")
"""Heads of columns that every table has."""
_LONG_NUMBER = 10
"""Largest number of characters of a number that the page shows as it was recorded."""
_MOST_METRICS = 4
"""Largest number of columns for metrics of runs without scores."""


@dataclass(frozen=True)
class Cell:
    """One cell: what the page shows, and the value by which rows are sorted and which the CSV file has; ``None``: there is none."""

    content: object
    value: float | str | None


@dataclass(frozen=True)
class Column:
    """One column: its head, whether its values are numbers, a cell for each run, and the unit of its values in the CSV file."""

    head: str
    numeric: bool
    cells: Sequence[Cell]
    unit: str = ""


def columns_of(runs: Sequence[RunData]) -> list[Column]:
    """Return the columns of the table: run, settings that differ, best score or last values, status, steps, time, start."""
    columns = [Column("run", False, [Cell(run.name, run.name) for run in runs])]
    columns += [_setting(name, values) for name, values in differing_settings(runs)]
    columns += [_scores(runs)] if any(run.score is not None for run in runs) else _last_values(runs)
    columns.append(Column("status", False, [Cell(run_status(run), run.status) for run in runs]))
    columns.append(Column("steps", True, [Cell(f"{run.step:,}", run.step) for run in runs]))
    times = [Cell(duration(run.training_s), run.training_s) if run.training_s else Cell("", None) for run in runs]
    starts = [Cell(element("time", moment(run.started)), _iso(run.started)) for run in runs]
    return [*columns, Column("training time", True, times, " (s)"), Column("started", False, starts)]


def run_table(runs: Sequence[RunData]) -> Html:
    """Return the table of ``runs``, which the page's script makes sortable, with a link that saves it as a CSV file."""
    columns = columns_of(runs)
    csv_bytes = _csv_text(columns).encode("utf-8", "replace")
    head = [element("th", column.head, scope="col", class_="number" if column.numeric else None) for column in columns]
    body = [
        element(
            "tr",
            element("th", runs[place].name, scope="row"),
            [_element(column, place) for column in columns[1:]],
            data_run=place,
        )
        for place in range(len(runs))
    ]
    inner = element(
        "table",
        element("caption", "Runs"),
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="sortable",
    )
    data = base64.b64encode(csv_bytes).decode()
    link = element("a", "Download as CSV", href=f"data:text/csv;charset=utf-8;base64,{data}", download="runs.csv")
    scrolled = element("div", inner, class_="scroll runs", role="region", aria_label="Runs", tabindex=0)
    return Html(f"{scrolled}{element('p', link, class_='download')}")


def _csv_text(columns: Sequence[Column]) -> str:
    """Return the table as CSV, with all digits of its numbers; a spreadsheet takes none of its texts for a formula."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow([to_cell(f"{column.head}{column.unit}") for column in columns])
    for cells in zip(*(column.cells for column in columns), strict=True):
        values = [cell.value for cell in cells]
        writer.writerow(
            ["" if value is None else to_cell(value) if isinstance(value, str) else repr(value) for value in values]
        )
    return file.getvalue()


def write_run_table(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Write a CSV file with a row for each run in ``folders``: settings that differ, best score, status, steps, seconds and start.

    Without scores of a ``ModelCheckpoint(monitor=...)``, it has the last values of the validation metrics, or else of others.

    Args:
        folders: folders of runs, as for :func:`write_report`.
        path: the path of the file.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: a folder has no run.
        ValueError: ``folders`` is empty.
    """
    text, path = run_table_text(folders), Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace", newline="")
    return path


def run_table_text(folders: Sequence[str | os.PathLike[str]]) -> str:
    """Return the content of the CSV file that :func:`write_run_table` writes about the runs in ``folders``; its errors are the same."""
    if not folders:
        raise ValueError("write_run_table(folders=[]): give a folder")
    runs, _ = read_runs(folders)
    return _csv_text(columns_of(runs))


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[str | None]]]:
    """Return the settings and hyperparameters that differ between ``runs``, each with its text for each run; ``None``: not set in this run."""
    configs = [{name: value for name, value, _ in run.config} for run in runs]
    defaults = {(name, value) for run in runs for name, value, origin in run.config if origin == "default"}
    rows: list[tuple[str, list[str | None]]] = []
    for name in dict.fromkeys(name for config in configs for name in config if name not in PLACES):
        recorded = [config.get(name) for config in configs if config]
        if len(set(recorded)) == 1:
            continue
        # A run of an earlier version lacks settings that came later, which had no other value than their default.
        different = {
            value for value in recorded if value is not None and (None not in recorded or (name, value) not in defaults)
        }
        if len(different) > 1 or (different and None in recorded):
            rows.append((name, [config.get(name) for config in configs]))
    return rows


def _element(column: Column, place: int) -> Html:
    cell, kind = column.cells[place], "number" if column.numeric else None
    return element("td", cell.content, class_=kind, data_value=None if cell.value is None else str(cell.value))


def _setting(name: str, texts: Sequence[str | None]) -> Column:
    numbers = [None if text is None else _as_number(text) for text in texts]
    numeric = all((text is None) == (value is None) for text, value in zip(texts, numbers, strict=True))
    values: Sequence[float | str | None] = numbers if numeric else texts
    cells = [
        Cell("" if text is None else _short(text, value), value) for text, value in zip(texts, values, strict=True)
    ]
    return Column(f"{name} (setting)" if name in _FIXED else name, numeric, cells)


def _short(text: str, value: float | str | None) -> str:
    """A setting's text, of a number with many digits six."""
    return number(value) if isinstance(value, float) and len(text) > _LONG_NUMBER else text


def _iso(seconds: float | None) -> str | None:
    """A time in UTC as text that sorts by time; ``None``: it is not valid."""
    try:
        return None if not seconds else datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):
        return None


def _scores(runs: Sequence[RunData]) -> Column:
    monitors = {(run.monitor, run.mode) for run in runs if run.score is not None}
    alike = len(monitors) == 1
    cells = [
        Cell("", None)
        if run.score is None
        else Cell(number(run.score) + ("" if alike else f" ({run.monitor})"), run.score)
        for run in runs
    ]
    monitor = next(iter(monitors))[0] if alike else ""
    return Column(f"best {monitor or 'score'}", True, cells)


def _last_values(runs: Sequence[RunData]) -> list[Column]:
    """Return columns with the last values of metrics: those of validations, or if there are none, others."""
    names = sorted({name for run in runs for name in run.metrics})
    chosen = [name for name in names if stage_of(name) == "val"] or names
    columns = []
    for name in chosen[:_MOST_METRICS]:
        values = [float(run.metrics[name].values[-1]) if name in run.metrics else None for run in runs]
        cells = [Cell("" if value is None else number(value), value) for value in values]
        columns.append(Column(f"last {name}", True, cells))
    return columns


def _as_number(text: str) -> float | None:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return None
