"""The record of a run: a file of JSON lines that is only ever appended to, so that a kill loses nothing before it.

======================  ================================================================================================
event                   fields, besides ``event`` and ``time`` (seconds since 1970)
======================  ================================================================================================
``start``               ``id``, ``stage``, ``step``, ``elapsed`` (s of training before), ``config``, ``hyperparameters``, ``machine``; a training
                        that resumes at ``step`` repeats what came later, so earlier values after ``step`` do not count
``values``              ``stage``, ``step``, ``epoch``, ``values``; in a training also ``apart`` (s of validation and checkpoints since the
                        start), ``samples`` (of all ranks so far), ``lr`` (by optimizer), ``memory`` (bytes, by kind)
``checkpoint``          ``path``, ``step``, ``score``, ``best`` (whether it is the best so far)
``removed``             ``path`` of a checkpoint
``times``               ``times``: where the seconds since the start went
``end``                 ``stage``, ``status``, ``reason``, ``step``, ``epoch``, ``times``
======================  ================================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

NAME = "report.jsonl"


class Record:
    """The record in the run's ``folder``, open for appending."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (folder / NAME).open("ab+", buffering=0)
        if self._file.seek(0, 2):
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":  # a kill left half a line
                self._file.write(b"\n")

    def add(self, event: str, **fields: Any) -> None:
        """Append a line in one write."""
        self._file.write(json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a record; lines that are not JSON objects (half written ones) are left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
