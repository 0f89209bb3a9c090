"""Metrics in a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from engine import Run

from .base import Logger, Moment

_FIXED = ("step", "epoch")
_CONFIG = "config.yaml"


class CSVLogger(Logger):
    """One row per log event: the first step, every ``log_every_n_steps`` steps, the last one, and after each evaluation.

    The columns are ``step`` (optimizer steps done), ``epoch`` (from 0), ``samples`` (trained on so far, by all ranks) and one for each metric, in
    the order in which they first appear; a metric that is missing in a row leaves its cell empty. A new metric adds a column and keeps
    earlier rows. Each row is flushed when the hook returns. Only the main process writes the file.

    A resumed run appends, after removing rows later than the step that it resumed from. A run that starts at step 0
    where such a file exists already first moves that file to ``metrics.1.csv`` (or the next free number).

    ``config.yaml`` in the same folder has the settings of the run with their origins, in the form of ``fit.yaml``, without secrets.
    """

    rewinds = True
    threaded = False

    def __init__(self, dir: str | os.PathLike[str] | None = None, name: str = "metrics.csv") -> None:
        """
        Args:
            dir: the folder of the file, created when missing; ``None`` is the run's folder.
            name: the file's name.

        Raises:
            ValueError: ``name`` is empty, has a folder in it, or is ``config.yaml``.
        """
        if not name or Path(name).name != name or name == _CONFIG:
            raise ValueError(
                f"CSVLogger(name={name!r}): name must be the name of a file without a folder, other than {_CONFIG}; give the folder as dir="
            )
        super().__init__(retries=0)
        self.dir = None if dir is None else Path(dir)
        self.name = name
        self.path: Path | None = None
        """The file; known from the start of the first run."""
        self._config = ""
        self._columns: list[str] = list(_FIXED)
        self._file: TextIO | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; dir={self.dir}, name={self.name}"

    @property
    def log_dir(self) -> str:
        """The folder of the file, on every rank."""
        return str(self._under_way("log_dir").folder if self.dir is None else self.dir)

    def describe(self, values: Mapping[str, Any]) -> None:
        """In ``hparams.json``, beside those that were logged before."""
        assert self.path is not None
        path = self.path.with_name("hparams.json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**known, **values}, indent=2, default=str) + "\n", encoding="utf-8")

    def open(self, run: Run) -> None:
        self.path = (run.folder if self.dir is None else self.dir) / self.name
        self._config = run.config_as_yaml()
        if self.path.exists():
            _read(self.path)

    def rewind(self, step: int) -> None:
        """Truncate (resumed) or move away (new run) an earlier run's file."""
        assert self.path is not None
        self._write_config(step)
        if not self.path.exists():
            return
        self.close("")
        if step > 0:
            columns, rows = _read(self.path)
            self._columns = columns
            _rewrite(self.path, columns, [row for row in rows if int(row["step"]) <= step])
        else:
            self.path.rename(free_name(self.path))
            self._columns = list(_FIXED)

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        own = {name: value for name, value in values.items() if name not in _FIXED}
        self._write({"step": at.step, "epoch": at.epoch, "samples": at.samples, **own})

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        assert self.path is not None
        rows = _read(self.path)[1] if self.path.exists() else []
        row = {"step": at.step, **{name: value for name, value in values.items() if name not in _FIXED}}
        return any(all(there.get(name) == str(value) for name, value in row.items()) for there in rows)

    def close(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_config(self, step: int) -> None:
        assert self.path is not None
        path = self.path.with_name(_CONFIG)
        if step == 0 and path.exists() and path.read_text(encoding="utf-8") != self._config:
            path.rename(free_name(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(self._config, encoding="utf-8")
        os.replace(temporary, path)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            self._open()
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        assert self._file is not None
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])
        self._file.flush()

    def _widen(self, new: list[str]) -> None:
        assert self.path is not None
        self.close("")
        _, rows = _read(self.path)
        self._columns = [*self._columns, *new]
        _rewrite(self.path, self._columns, rows)
        self._file = self.path.open("a", newline="", encoding="utf-8")

    def _open(self) -> None:
        """Open the file for appending; its columns are those of its header."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._columns, rows = _read(self.path)
            _rewrite(self.path, self._columns, rows)
        else:
            self._columns = list(_FIXED)
            _rewrite(self.path, self._columns, [])
        self._file = self.path.open("a", newline="", encoding="utf-8")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a metrics file. A last row that a crash left unfinished is dropped.

    Raises:
        ValueError: the file is not one that :class:`CSVLogger` wrote.
    """
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        return list(_FIXED), []
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    columns = list(reader.fieldnames or [])
    if columns[:2] != list(_FIXED):
        raise ValueError(
            f"CSVLogger: {path} exists and is not a metrics file (its columns are {columns}); move it, or give another dir= or name="
        )
    return columns, list(reader)


def _rewrite(path: Path, columns: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file atomically: a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def free_name(path: Path) -> Path:
    """``path`` with the next free number before its ending."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
