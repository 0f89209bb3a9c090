"""Notes in the run's folder how far a run's values have reached a tracker, so that a kill of the process does not lose it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from engine import separate

Position = tuple[int, int]
"""A step, and how many times something was logged at this step."""

START: Position = (-1, 0)
_WIDTH = 160


class SentMark:
    """The position up to which a logger has sent the values of one run.

    Args:
        path: the file of the mark.
        run_id: id of the run; a mark of another run does not count.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._name = path, json.dumps(run_id)
        self._file: BinaryIO | None = None
        self.sent, self.doubtful, self.count, self.row_step = _read(path, run_id)
        """``sent``: position up to which everything was sent; ``doubtful``: position that was being sent at a kill, or ``None``; ``count``: number of
        calls that were sent; ``row_step``: step of the run's last values."""

    def forget_after(self, step: int) -> None:
        """Forget what was sent after ``step``; 0: forget everything."""
        self.sent = min(self.sent, (step + 1, 0)) if step else START
        self.row_step = min(self.row_step, step) if step else -1
        if self.doubtful is not None and (self.doubtful[0] > step or not step):
            self.doubtful = None

    def take_back(self, position: Position) -> range:
        """Forget what was sent at the same step after ``position``; return its numbers."""
        step, number = position
        last = max((numbered for at, numbered in (self.sent, self.doubtful or START) if at == step), default=0)
        if last <= number:
            return range(0)
        self.sent, self.doubtful = min(self.sent, position), None
        self.row_step = min(self.row_step, step if number else step - 1)
        return range(number + 1, last + 1)

    def note_sending(self, position: Position) -> bool:
        """Note that the row at ``position`` is being sent. Returns whether a kill may have sent it before."""
        doubtful, self.doubtful = self.doubtful == position, position
        self._write()
        return doubtful

    def note_sent(self, position: Position | None, row_step: int | None = None) -> None:
        """Note that the row at ``position`` was sent; ``None``: a row of an evaluation. ``row_step``: the step, if they are the run's own values."""
        self.row_step = self.row_step if row_step is None else row_step
        if position is not None:
            self.sent, self.doubtful = max(self.sent, position), None
        self.count += 1
        # The row is sent, and must not be sent again because the mark cannot be written: after a kill the tracker is asked.
        with suppress(OSError):
            self._write()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            separate(self._path)
            self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0)
        doubtful = "null" if self.doubtful is None else list(self.doubtful)
        text = f"[{self._name}, {list(self.sent)}, {doubtful}, {self.count}, {self.row_step}]"  # JSON, written twice for each row of each logger
        os.pwrite(self._file.fileno(), text.ljust(_WIDTH).encode() + b"\n", 0)


def _read(path: Path, run_id: str) -> tuple[Position, Position | None, int, int]:
    try:
        name, sent, doubtful, count, *row_step = json.loads(path.read_text())
        if name != run_id:
            return START, None, 0, -1
        step = int(row_step[0]) if row_step else -1
        return _position(sent), None if doubtful is None else _position(doubtful), int(count), step
    except (OSError, ValueError, TypeError):
        return START, None, 0, -1


def _position(value: Any) -> Position:
    step, number = map(int, value)
    return step, number
