"""A logger for metrics in a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from engine import Run

from .append_file import AppendFile, replace_file
from .base import Logger, Moment
from .bounded_lines import LONGEST_OWN, is_whole
from .csv_cells import from_cell, to_cell

_FIXED = ("step", "epoch")
_RUN_STEP = "run_step"
_CONFIG = "config.yaml"
_END = b"\r\n"
"""The end of a row, as Python's ``csv`` writes it."""


class CSVLogger(Logger):
    """Writes one row per log event: at the first step, every ``log_every_n_steps`` steps, at the last step, and after each evaluation.

    The columns are ``step`` (optimizer steps done), ``epoch`` (from 0), ``samples`` (trained on so far, by all ranks) and one for each metric, in
    the order in which they first appear; a metric that is missing in a row leaves its cell empty. A new metric adds a column and keeps
    earlier rows. Each row is flushed when the hook returns. Only the main process writes the file. A row of ``log_metrics(..., step=)`` has
    that step, and the optimizer steps done in a column ``run_step``.

    A name that a spreadsheet would take for a formula (``=...``, ``+...``, ``-...``, ``@...``) has an apostrophe before it, in the first
    row; numbers stay as they are.

    A resumed run removes the rows that were logged after the step that it resumes from, and appends. A run that starts at step 0
    moves an existing file to ``metrics.1.csv`` (or the next free number).

    ``config.yaml`` in the same folder has the settings of the run with their origins, in the form of ``fit.yaml``, without secrets.
    """

    rewinds = takes_back = True
    threaded = False

    def __init__(self, dir: str | os.PathLike[str] | None = None, name: str = "metrics.csv") -> None:
        """
        Args:
            dir: the folder of the file, created if missing; ``None`` is the run's folder.
            name: the file's name.

        Raises:
            ValueError: ``name`` is empty, has a folder in it, or is ``config.yaml``.
        """
        if not name or Path(name).name != name or name == _CONFIG:
            raise ValueError(
                f"CSVLogger(name={name!r}): name must be the name of a file without a folder, other than {_CONFIG}; give the folder as dir="
            )
        super().__init__(retries=0)
        self.dir = None if dir is None else Path(dir).expanduser()
        self.name = name
        self.path: Path | None = None
        """The path of the file; known from the start of the first run."""
        self._config = ""
        self._columns: dict[str, None] = dict.fromkeys(_FIXED)
        """The names of the columns, in order."""
        self._file: AppendFile | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; dir={self.dir}, name={self.name}"

    @property
    def log_dir(self) -> str:
        """The folder of the file, on every rank."""
        return str(self._require_run("log_dir").folder if self.dir is None else self.dir)

    def describe(self, values: Mapping[str, Any]) -> None:
        """Add hyperparameters to ``hparams.json``, next to the CSV file."""
        assert self.path is not None
        path = self.path.with_name("hparams.json")
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        replace_file(path, json.dumps({**earlier, **values}, indent=2, default=str).encode() + b"\n")

    def open(self, run: Run) -> None:
        self.path = (run.folder if self.dir is None else self.dir) / self.name
        self._config = run.config_as_yaml()
        if self.path.exists():
            _header(self.path)

    def rewind(self, step: int) -> None:
        """Truncate (resumed) or move away (new run) an earlier run's file."""
        assert self.path is not None
        self._write_config(step)
        if not self.path.exists():
            return
        self.close("")
        if step > 0:
            columns, rows = _read(self.path)
            self._columns = dict.fromkeys(columns)
            _rewrite(self.path, columns, [row for row in rows if int(row.get(_RUN_STEP) or row["step"]) <= step])
        else:
            self.path.rename(free_name(self.path))
            self._columns = dict.fromkeys(_FIXED)

    def take_back(self, step: int, numbers: range) -> None:
        assert self.path is not None
        if self.path.exists():
            columns, rows = _read(self.path)
            rows_of_step = [row for row in rows if int(row.get(_RUN_STEP) or row["step"]) == step]
            removed = {id(row) for number, row in enumerate(rows_of_step, 1) if number in numbers}
            _rewrite(self.path, columns, [row for row in rows if id(row) not in removed])

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        metrics = {name: value for name, value in values.items() if name not in _FIXED}
        run_step = {} if at.run_step is None else {_RUN_STEP: at.run_step}
        self._write({"step": at.step, "epoch": at.epoch, "samples": at.samples, **run_step, **metrics})

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        assert self.path is not None
        rows = _read(self.path)[1] if self.path.exists() else []
        expected = {"step": at.step, **{name: value for name, value in values.items() if name not in _FIXED}}
        return any(all(row.get(name) == str(value) for name, value in expected.items()) for row in rows)

    def close(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_config(self, step: int) -> None:
        assert self.path is not None
        path = self.path.with_name(_CONFIG)
        if step == 0 and path.exists() and path.read_text(encoding="utf-8") != self._config:
            path.rename(free_name(path))
        replace_file(path, self._config.encode())

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            self._open()
        if new := [name for name in row if name not in self._columns]:
            self._add_columns(new)
        assert self._file is not None
        self._file.write(_line([row.get(name, "") for name in self._columns]))

    def _add_columns(self, new: list[str]) -> None:
        """Add columns to the file: empty cells at the end of each row, which is not read for it, since a run may have many rows and late names."""
        assert self.path is not None
        self.close("")
        self._columns |= dict.fromkeys(new)
        _, _, rows = self.path.read_bytes().partition(_END)  # no cell has this end in it: see to_cell
        whole = rows[: rows.rfind(_END) + len(_END)] if _END in rows else b""
        replace_file(self.path, _line(map(to_cell, self._columns)) + whole.replace(_END, b"," * len(new) + _END))
        self._file = AppendFile(self.path)

    def _open(self) -> None:
        """Open the file for appending; its columns are those of its header."""
        assert self.path is not None
        self._columns = dict.fromkeys(_header(self.path) if self.path.exists() else [])
        if not self._columns:
            self._columns = dict.fromkeys(_FIXED)
            _rewrite(self.path, list(self._columns), [])
        self._file = AppendFile(self.path, lines=True)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a metrics file, without a last row that a crash left unfinished.

    Raises:
        ValueError: the file is not one that :class:`CSVLogger` wrote.
    """
    with path.open("rb") as file:
        lines = csv.reader(_lines(path, file))
        columns = _columns(path, next(lines, []))
        return columns or list(_FIXED), [dict(zip(columns, row, strict=False)) for row in lines if row]


def _header(path: Path) -> list[str]:
    """The columns of a metrics file, without reading its rows; empty if it has none."""
    with path.open("rb") as file:
        return _columns(path, next(csv.reader(_lines(path, file)), []))


def _lines(path: Path, file: BinaryIO) -> Iterator[str]:
    """The complete lines of a metrics file."""
    while line := file.readline(LONGEST_OWN):
        if not is_whole(line, LONGEST_OWN):
            raise ValueError(
                f"CSVLogger: {path} exists and is not a metrics file; move it, or give another dir= or name="
            )
        if line.endswith(b"\n"):
            yield line.decode()


def _columns(path: Path, header: list[str]) -> list[str]:
    columns = [from_cell(cell) for cell in header]
    if columns and columns[:2] != list(_FIXED):
        raise ValueError(
            f"CSVLogger: {path} exists and is not a metrics file (its columns are {columns}); move it, or give another dir= or name="
        )
    return columns


def _rewrite(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    lines = [[to_cell(name) for name in columns], *([row.get(name, "") for name in columns] for row in rows)]
    replace_file(path, b"".join(map(_line, lines)))


def _line(cells: Iterable[Any]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(cells)
    return text.getvalue().encode()


def free_name(path: Path) -> Path:
    """Return ``path`` with the next free number before its suffix."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
