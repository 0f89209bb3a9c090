"""The points of a curve: collected, thinned without losing a peak, and packed for a page."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LARGEST = float(np.finfo(np.float32).max)


class Points:
    """Values of one curve in the order in which they were recorded, as pieces of steps, seconds of training (NaN: not recorded) and values."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Array, Array, Array]] = []

    def add(self, steps: Array, seconds: Array, values: Array) -> None:
        """Add arrays of one length, float64 [n], which must not change; several curves may share arrays of steps and seconds."""
        if len(steps):
            self._pieces.append((steps, seconds, values))

    def cut(self, step: int) -> None:
        """Remove the values after ``step``."""
        for index, (steps, seconds, values) in enumerate(self._pieces):
            in_range = steps <= step
            if not in_range.all():
                self._pieces[index] = steps[in_range], seconds[in_range], values[in_range]

    def curve(self, shared: dict[tuple[int, ...], Array]) -> Curve:
        """Return the values sorted by step, one for each step: the last one recorded.

        Args:
            shared: arrays of steps and of seconds that other curves have.
        """
        pieces = list(zip(*self._pieces, strict=True)) or [(np.empty(0),)] * 3
        steps, seconds = (_shared_array(arrays, shared) for arrays in pieces[:2])
        values = np.concatenate(pieces[2])
        if (np.diff(steps) > 0).all():
            return Curve(steps, seconds, values)
        order = np.argsort(steps, kind="stable")
        latest = order[np.append(np.diff(steps[order]) > 0, True)]
        return Curve(steps[latest], seconds[latest], values[latest])


def _shared_array(arrays: tuple[Array, ...], shared: dict[tuple[int, ...], Array]) -> Array:
    key = tuple(map(id, arrays))
    if key not in shared:
        shared[key] = np.concatenate(arrays)
    return shared[key]


@dataclass(eq=False)
class Curve:
    """A curve: arrays of one length, float64 [n], with ``steps`` (increasing), ``seconds`` and ``values``."""

    steps: Array
    seconds: Array
    values: Array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and all(
            np.array_equal(mine, its) for mine, its in ((self.steps, other.steps), (self.values, other.values))
        )

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> tuple[Array, Array]:
        """Steps and values of the points whose value is finite."""
        good = np.isfinite(self.values)
        return self.steps[good], self.values[good]

    def thinned(self, limit: int) -> Curve:
        """Return at most about ``limit`` points: both ends, and the lowest and highest of each stretch of equally many points."""
        count = len(self)
        if count <= limit:
            return self
        stretches = max(1, limit // 2 - 1)
        edges = np.linspace(0, count, stretches + 1).astype(np.int64)[:-1]
        lowest, highest = (
            _first_lowest(np.where(np.isnan(self.values), np.inf, sign * self.values), edges) for sign in (1, -1)
        )
        selected = np.zeros(count, dtype=bool)
        selected[lowest] = selected[highest] = selected[[0, -1]] = True
        return Curve(self.steps[selected], self.seconds[selected], self.values[selected])


def _first_lowest(values: Array, edges: Array) -> Array:
    """The index of the first lowest value of each stretch that begins at an edge."""
    lowest = np.repeat(np.minimum.reduceat(values, edges), np.diff(np.append(edges, len(values))))
    indices = np.flatnonzero(values == lowest)
    return indices[np.searchsorted(indices, edges)]


class Packed:
    """Packs arrays of float32 or float64 into one compressed text; equal arrays are stored once."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(4, wbits=31)  # gzip
        self._compressed: list[bytes] = []
        self._stored: dict[bytes, list[int]] = {}
        self._size = 0

    def add(self, values: Array) -> list[int]:
        """Store ``values`` as float32. Returns where they are: offset in bytes, count, and bytes of an element."""
        # An infinity stays one, and nothing else becomes one.
        return self._store(np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values).astype("<f4"))

    def add_increasing(self, values: Array) -> list[int]:
        """Store ``values`` so that they stay different: as float32 where it holds them exactly, else as float64."""
        short = values.astype("<f4")
        return self._store(short if np.array_equal(short, values) else values.astype("<f8"))

    def _store(self, values: Array) -> list[int]:
        raw = values.tobytes()
        key = hashlib.blake2b(raw).digest()
        if key not in self._stored:
            self._stored[key] = [self._size, len(values), values.itemsize]
            raw += b"\0" * (-len(raw) % 8)
            self._size += len(raw)
            self._compressed.append(self._compressor.compress(raw))
        return self._stored[key]

    def text(self) -> str:
        """Return all arrays as one text: base64 of gzip. Called once."""
        return base64.b64encode(b"".join((*self._compressed, self._compressor.flush()))).decode()


def share(curves: Sequence[Curve], limit: int) -> int:
    """Return how many points a curve may have so that all curves together have about ``limit``: short curves keep all of their points."""
    points_left, lengths = limit, sorted(map(len, curves))
    for index, length in enumerate(lengths):
        fair = points_left // (len(lengths) - index)
        if length > fair:
            return max(4, fair)
        points_left -= length
    return max(lengths, default=0)
