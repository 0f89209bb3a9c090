"""A logger for all values as lines of JSON, with media as files next to them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import Run

from .append_file import AppendFile, replace_file
from .base import Logger, Moment, settings_of
from .bounded_lines import LONGEST_OWN, is_whole
from .csv import free_name
from .media import ENDINGS, cells, content, file_name, histogram, jsonable


class JSONLLogger(Logger):
    """Writes one line, a JSON object, per log event and per medium::

        {"step": 20, "epoch": 1, "samples": 640, "time": 1763836103.1, "values": {"train/loss": 0.25}}
        {"step": 20, "epoch": 1, "samples": 640, "time": 1763836103.2, "kind": "image", "name": "val/first", "file": "media/val/first-step=..."}

    ``step``: optimizer steps done; ``epoch``: from 0; ``samples``: trained on so far, by all ranks; ``time``: seconds since 1970. NaN and
    infinity are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. A line of ``log_metrics(..., step=)`` has that step, and the optimizer steps done as
    ``"run_step"``. Images, figures, sounds, texts and artifacts are files, their paths relative to the
    lines' folder; a histogram is ``"counts"`` and ``"edges"``, a table ``"columns"`` and ``"rows"``. The first line of a training has the
    hyperparameters and settings, without secrets, as ``"settings"``, and the run's id as ``"run"``.

    Each line is in the file when the hook returns. A resumed run first removes the lines that were logged after its step; a new run
    moves an earlier file to ``metrics.1.jsonl`` (or the next free number).
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table", "artifact"})
    rewinds = takes_back = True
    threaded = False

    def __init__(self, dir: str | os.PathLike[str] | None = None, name: str = "metrics.jsonl") -> None:
        """
        Args:
            dir: the folder of the file, created if missing; ``None`` is the run's folder.
            name: the file's name; media are in the folder ``media`` beside it.

        Raises:
            ValueError: ``name`` is empty or has a folder in it.
        """
        if not name or Path(name).name != name:
            raise ValueError(f"JSONLLogger(name={name!r}): name must be the name of a file; give the folder as dir=")
        super().__init__(retries=0)
        self.dir = None if dir is None else Path(dir).expanduser()
        self.name = name
        self.path: Path | None = None
        """The path of the file; known from the start of the first run."""
        self._first: dict[str, Any] = {}
        self._file: AppendFile | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; dir={self.dir}, name={self.name}"

    @property
    def log_dir(self) -> str:
        """The folder of the file, on every rank."""
        return str(self._require_run("log_dir").folder if self.dir is None else self.dir)

    def describe(self, values: Mapping[str, Any]) -> None:
        """Append a line with hyperparameters as ``"settings"``."""
        self._write({"settings": {name: jsonable(v) if isinstance(v, float) else v for name, v in values.items()}})

    def open(self, run: Run) -> None:
        self.path = (run.folder if self.dir is None else self.dir) / self.name
        self._first = {"run": run.id, "settings": settings_of(run)}
        if self.path.exists():
            list(_lines(self.path))

    def rewind(self, step: int) -> None:
        assert self.path is not None
        self.close("")
        if step > 0 and self.path.exists():
            kept_lines = [text for text, line in _lines(self.path) if line.get("run_step", line.get("step", 0)) <= step]
            replace_file(self.path, "".join(kept_lines).encode())
            return
        if self.path.exists() and self.path.stat().st_size:
            self.path.rename(free_name(self.path))
        self._write(self._first)

    def take_back(self, step: int, numbers: range) -> None:
        assert self.path is not None
        if not self.path.exists():
            return
        kept_lines, number = [], 0
        for text, line in _lines(self.path):
            is_of_step = line.get("run_step", line.get("step")) == step
            number += is_of_step
            if not is_of_step or number not in numbers:
                kept_lines.append(text)
        replace_file(self.path, "".join(kept_lines).encode())

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        self._write(_head(at) | {"values": {name: jsonable(value) for name, value in values.items()}})

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        assert self.path is not None
        expected = {name: jsonable(value) for name, value in values.items()}
        lines = _lines(self.path) if self.path.exists() else []
        return any(line.get("step") == at.step and line.get("values") == expected for _, line in lines)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        line: dict[str, Any] = _head(at) | {"kind": kind, "name": name}
        if kind == "histogram":
            line["counts"], line["edges"] = histogram(value)
        elif kind == "table":
            line["columns"], line["rows"] = value[0], cells(value[1])
        if options.get("caption") is not None:
            line["caption"] = options["caption"]
        if kind not in ENDINGS:
            self._write(line)
            return
        with self._new_medium_file(line, name, at, ENDINGS[kind]) as target:
            target.write_bytes(content(kind, value, options.get("sample_rate", 44100)))

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        with self._new_medium_file(_head(at) | {"kind": "artifact", "name": name}, name, at, path.suffix) as target:
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copy2(path, target)

    def close(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self.path is not None
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = AppendFile(self.path, lines=True)
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    @contextmanager
    def _new_medium_file(self, line: dict[str, Any], name: str, at: Moment, ending: str) -> Iterator[Path]:
        """Yield a new path for the file that the block writes, and append its ``line``. After an error neither file nor line exists."""
        assert self.path is not None
        number = 0
        while (path := self.path.parent / "media" / file_name(name, at.step, ending, number)).exists():
            number += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield path
            self._write(line | {"file": path.relative_to(self.path.parent).as_posix()})
        except OSError:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            raise


def _head(at: Moment) -> dict[str, Any]:
    run_step = {} if at.run_step is None else {"run_step": at.run_step}
    return {"step": at.step, **run_step, "epoch": at.epoch, "samples": at.samples, "time": at.time}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The complete lines of a file, as text and as objects.

    Raises:
        ValueError: the file is not one that :class:`JSONLLogger` wrote.
    """
    with path.open("rb") as file:
        while content := file.readline(LONGEST_OWN):
            if content.endswith(b"\n") or not is_whole(content, LONGEST_OWN):
                try:
                    text = content.decode()
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise ValueError
                except ValueError as error:
                    raise ValueError(
                        f"JSONLLogger: {path} exists and is not a file of metrics; move it, or give another dir= or name="
                    ) from error
                yield text, line
