"""The record of a run: a file of JSON lines that is only ever appended to, so that a kill loses nothing before it.

======================  ================================================================================================
event                   fields, besides ``event`` and ``time`` (seconds since 1970)
======================  ================================================================================================
``start``               ``id``, ``stage``, ``step``, ``elapsed`` (s of training before), ``config``, ``hyperparameters``, ``machine``; a training
                        that resumes at ``step`` repeats what came later, so earlier values after ``step`` do not count
``columns``             names of the numbers after :data:`HEAD` in rows with this ``number``: ``values``, ``lr`` (by optimizer), ``memory`` (by kind)
``checkpoint``          ``path``, ``step``, ``score``; of earlier versions also ``best`` (whether it is the best so far)
``best``                ``path`` of the checkpoint that is the best from now on
``removed``             ``path`` of a checkpoint
``stage``               ``kind`` and ``text`` of a stage of the training, and the ``step`` after which it begins: ``batch size``, ``512``
``table``               ``name``, ``columns``, ``rows`` (a list of values each) of a table that a callback has made
``times``               ``times``: where the seconds since the start went
``end``                 ``stage``, ``status``, ``reason``, ``step``, ``epoch``, ``times``
======================  ================================================================================================

A row is a JSON string: base64 of numbers, float64, little-endian. So a name is in the file once, and 10^5 rows are read in a moment. Earlier
versions wrote an event ``values`` with ``stage``, ``step``, ``epoch``, and ``values``, ``lr`` and ``memory`` by name.
"""

from __future__ import annotations

import json
import math
import struct
import time
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..loggers.append_file import AppendFile
from ..loggers.bounded_lines import LONGEST, bounded_lines, is_whole, skip_hole
from ..loggers.sender import Item, Sender

NAME = "report.jsonl"
HEAD = ("number", "time", "step", "epoch", "apart", "samples")
"""The first numbers of a row. ``apart``: seconds of validation and checkpoints since the start; ``samples``: on all ranks; NaN in evaluations."""
_ROWS = 5_000
"""Number of rows that are read together."""
WHOLE = 64 << 20
"""Size of the largest file whose rows are all read, in bytes."""
_ENDS, PLACES, _STRETCH = 1 << 20, 2048, 4096
"""Parts of a larger file that are read: bytes at either end, places between the ends, bytes at each place."""
_LONGEST_ROW = 1 << 20
"""Longest line that is read at a place between the ends, in bytes."""
_BARREN = 64
"""Number of places without a line's end after which no more places are tried."""
_DAMAGED_LIMIT = 200_000
"""Number of lines that look like events and are not, after which no more lines are read."""


class Record:
    """The record in the run's ``folder``, open for appending. Lines that cannot be written now (a full disk) wait until they can be."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(folder / NAME, lines=True)
        self._sender = Sender("Report", 0, 10_000, threaded=False)
        self._columns: dict[tuple[tuple[str, ...], ...], int] = {}

    def add(self, event: str, **fields: Any) -> None:
        """Append an event as a line, in one write."""
        self._write(json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n")

    def row(
        self,
        step: int,
        epoch: int,
        values: Mapping[str, float],
        lr: Mapping[str, float],
        memory: Mapping[str, int],
        apart: float = math.nan,
        samples: float = math.nan,
    ) -> None:
        """Append a row of numbers, and before it their names, unless an earlier row had equal names."""
        names = tuple(values), tuple(lr), tuple(memory)
        number = self._columns.get(names)
        if number is None:
            number = self._columns[names] = len(self._columns)
            self.add("columns", number=number, **dict(zip(("values", "lr", "memory"), names, strict=True)))
        head = number, time.time(), step, epoch, apart, samples
        row = packed((*head, *values.values(), *lr.values(), *memory.values()))
        self._write(b'"' + b2a_base64(row, newline=False) + b'"\n')

    def close(self) -> None:
        """Write the lines that wait, and close the file."""
        self._sender.end(self._file.close, 30.0)

    def _write(self, line: bytes) -> None:
        self._sender.submit(Item(partial(self._file.write, line)))


def packed(numbers: Sequence[float]) -> bytes:
    """Return a row's numbers as bytes."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def sampled_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of lines of a file with more than :data:`WHOLE` bytes: at its ends, and at evenly spaced places between them."""
    size = file.seek(0, 2)
    between, barren = size - 2 * _ENDS, 0
    starts = [_ENDS + between * place // PLACES for place in range(PLACES)]
    for start, end in [(0, _ENDS), *((start, start + _STRETCH) for start in starts), (size - _ENDS, size)]:
        longest = _LONGEST_ROW if start else LONGEST
        place = file.seek(max(0, start - 1))
        if start:
            line = file.readline(longest)
            place += len(line)
            if not is_whole(line, longest):
                barren += 1
                if barren == _BARREN:
                    return
                continue
        while place < end and is_whole(line := file.readline(longest), longest) and line:
            yield place, line
            place += len(line)


def _sampled_rows(file: BinaryIO, scanned: BinaryIO) -> Iterator[bytes]:
    """Yield all lines of a large record that are not rows, and some rows. ``scanned``: the record, opened a second time."""
    offsets = _offsets_of_events(scanned)
    offset = next(offsets, None)
    for place, line in sampled_lines(file):
        while offset is not None and offset <= place:
            position = file.tell()
            file.seek(offset)
            yield file.readline(LONGEST)
            file.seek(position)
            offset = next(offsets, None)
        if line.startswith(b'"'):
            yield line
    while offset is not None:
        file.seek(offset)
        yield file.readline(LONGEST)
        offset = next(offsets, None)


def _offsets_of_events(file: BinaryIO) -> Iterator[int]:
    """Yield the offsets of lines that are not rows. They begin with a brace; rows have none."""
    start, before = file.seek(0), b"\n"
    while block := file.read(1 << 20):
        text = before + block
        place = text.find(b"{", 1)
        while place >= 0:
            if text[place - 1] == ord("\n"):
                yield start + place - 1
            place = text.find(b"{", place + 1)
        skip_hole(file)
        start, before = file.tell(), block[-1:]


def events(path: Path, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the events of a record; lines that are neither JSON objects nor rows (half-written lines) are left out.

    A record with more than :data:`WHOLE` bytes gives only the rows of :func:`sampled_lines`, unless ``whole`` is true.

    Rows that follow each other are one event ``rows``, with a list of :func:`packed` numbers; each has its own time.
    """
    rows: list[bytes] = []
    damaged_lines_left = _DAMAGED_LIMIT
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        if whole or path.stat().st_size <= WHOLE:
            lines = bounded_lines(file)
        else:
            lines = _sampled_rows(file, opened.enter_context(path.open("rb")))
        for line in lines:
            if line.startswith(b'"'):
                with suppress(ValueError):
                    rows.append(a2b_base64(line.rstrip(b'"\n')) if line.endswith(b'"\n') else b"")
            if rows and (len(rows) >= _ROWS or not line.startswith(b'"')):
                yield {"event": "rows", "time": 0.0, "rows": rows}
                rows = []
            if line.startswith(b"{"):
                if (event := _parsed(line)) is not None:
                    yield event
                elif (damaged_lines_left := damaged_lines_left - 1) < 0:
                    break
        if rows:
            yield {"event": "rows", "time": 0.0, "rows": rows}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and event.get("event") != "rows" else None
