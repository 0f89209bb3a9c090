"""Everything that is logged as lines of JSON, with media as files beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from engine import Run

from .base import Logger, Moment, settings_of
from .csv import free_name
from .media import ENDINGS, cells, content, file_name, histogram, jsonable


class JSONLLogger(Logger):
    """One line, an object, per log event and per medium::

        {"step": 20, "epoch": 1, "samples": 640, "time": 1763836103.1, "values": {"train/loss": 0.25}}
        {"step": 20, "epoch": 1, "samples": 640, "time": 1763836103.2, "kind": "image", "name": "val/first", "file": "media/val/first-step=..."}

    ``step``: optimizer steps done; ``epoch``: from 0; ``samples``: trained on so far, by all ranks; ``time``: seconds since 1970. NaN and
    infinity are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. Images, figures, sounds, texts and artifacts are files, their paths relative to the
    lines' folder; a histogram is ``"counts"`` and ``"edges"``, a table ``"columns"`` and ``"rows"``. The first line of a training has the
    hyperparameters and settings, without secrets, as ``"settings"``, and the run's id as ``"run"``.

    Each line is in the file when the hook returns. A resumed run first removes the lines later than its step; a new one
    moves an earlier file to ``metrics.1.jsonl`` (or the next free number).
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table", "artifact"})
    rewinds = True
    threaded = False

    def __init__(self, dir: str | os.PathLike[str] | None = None, name: str = "metrics.jsonl") -> None:
        """
        Args:
            dir: the folder of the file, created when missing; ``None`` is the run's folder.
            name: the file's name; media are in the folder ``media`` beside it.

        Raises:
            ValueError: ``name`` is empty or has a folder in it.
        """
        if not name or Path(name).name != name:
            raise ValueError(f"JSONLLogger(name={name!r}): name must be the name of a file; give the folder as dir=")
        super().__init__(retries=0)
        self.dir = None if dir is None else Path(dir)
        self.name = name
        self.path: Path | None = None
        """The file; known from the start of the first run."""
        self._first: dict[str, Any] = {}
        self._file: TextIO | None = None

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; dir={self.dir}, name={self.name}"

    @property
    def log_dir(self) -> str:
        """The folder of the file, on every rank."""
        return str(self._under_way("log_dir").folder if self.dir is None else self.dir)

    def describe(self, values: Mapping[str, Any]) -> None:
        """A line with ``"settings"``."""
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
            temporary = self.path.with_name(self.path.name + ".new")
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(text for text, line in _lines(self.path) if line.get("step", 0) <= step)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            return
        if self.path.exists():
            self.path.rename(free_name(self.path))
        self._write(self._first)

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        self._write(_head(at) | {"values": {name: jsonable(value) for name, value in values.items()}})

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        assert self.path is not None
        wanted = {name: jsonable(value) for name, value in values.items()}
        lines = _lines(self.path) if self.path.exists() else []
        return any(line.get("step") == at.step and line.get("values") == wanted for _, line in lines)

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        line: dict[str, Any] = _head(at) | {"kind": kind, "name": name}
        if kind == "histogram":
            line["counts"], line["edges"] = histogram(value)
        elif kind == "table":
            line["columns"], line["rows"] = value[0], cells(value[1])
        else:
            path = self._free(name, at.step, ENDINGS[kind])
            path.write_bytes(content(kind, value, options.get("sample_rate", 44100)))
            line["file"] = self._relative(path)
        if options.get("caption") is not None:
            line["caption"] = options["caption"]
        self._write(line)

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        target = self._free(name, at.step, path.suffix)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy2(path, target)
        self._write(_head(at) | {"kind": "artifact", "name": name, "file": self._relative(target)})

    def close(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self.path is not None
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = "".join(text for text, _ in _lines(self.path)) if self.path.exists() else ""
            self._file = self.path.open("r+" if self.path.exists() else "w", encoding="utf-8")
            self._file.seek(len(whole.encode()))
            self._file.truncate()  # a line that a crash left unfinished
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def _free(self, name: str, step: int, ending: str) -> Path:
        assert self.path is not None
        number = 0
        while (path := self.path.parent / "media" / file_name(name, step, ending, number)).exists():
            number += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _relative(self, path: Path) -> str:
        assert self.path is not None
        return path.relative_to(self.path.parent).as_posix()


def _head(at: Moment) -> dict[str, Any]:
    return {"step": at.step, "epoch": at.epoch, "samples": at.samples, "time": at.time}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The complete lines of a file, as text and as objects.

    Raises:
        ValueError: the file is not one that :class:`JSONLLogger` wrote.
    """
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):
                try:
                    line = json.loads(text)
                    if not isinstance(line, dict):
                        raise ValueError
                except ValueError as error:
                    raise ValueError(
                        f"JSONLLogger: {path} exists and is not a file of metrics; move it, or give another dir= or name="
                    ) from error
                yield text, line
