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
    """Values in the order in which they were recorded, as pieces of steps, seconds of training until then (NaN: not recorded) and values."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Array, Array, Array]] = []

    def add(self, steps: Array, seconds: Array, values: Array) -> None:
        """Add arrays of one length, float64 [n], which must not change; several curves may share those of steps and seconds."""
        if len(steps):
            self._pieces.append((steps, seconds, values))

    def cut(self, step: int) -> None:
        """Forget what came after ``step``."""
        for index, (steps, seconds, values) in enumerate(self._pieces):
            kept = steps <= step
            if not kept.all():
                self._pieces[index] = steps[kept], seconds[kept], values[kept]

    def curve(self, shared: dict[tuple[int, ...], Array]) -> Curve:
        """Sorted by step, with one value for each: the last one recorded.

        Args:
            shared: arrays of steps and of seconds that other curves have.
        """
        pieces = list(zip(*self._pieces, strict=True)) or [(np.empty(0),)] * 3
        steps, seconds = (_shared(arrays, shared) for arrays in pieces[:2])
        values = np.concatenate(pieces[2])
        if (np.diff(steps) > 0).all():
            return Curve(steps, seconds, values)
        order = np.argsort(steps, kind="stable")
        kept = order[np.append(np.diff(steps[order]) > 0, True)]
        return Curve(steps[kept], seconds[kept], values[kept])


def _shared(arrays: tuple[Array, ...], shared: dict[tuple[int, ...], Array]) -> Array:
    key = tuple(map(id, arrays))
    if key not in shared:
        shared[key] = np.concatenate(arrays)
    return shared[key]


@dataclass(eq=False)
class Curve:
    """Arrays of one length, float64 [n]: ``steps`` (increasing), ``seconds`` and ``values``."""

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
        """Steps and values without those that are NaN or infinite."""
        good = np.isfinite(self.values)
        return self.steps[good], self.values[good]

    def thinned(self, limit: int) -> Curve:
        """At most about ``limit`` points: the lowest and the highest of each stretch of equally many, and both ends."""
        count = len(self)
        if count <= limit:
            return self
        stretches = max(1, limit // 2 - 1)
        edges = np.linspace(0, count, stretches + 1).astype(np.int64)[:-1]
        lowest, highest = (
            _firsts(np.where(np.isnan(self.values), np.inf, sign * self.values), edges) for sign in (1, -1)
        )
        kept = np.zeros(count, dtype=bool)
        kept[lowest] = kept[highest] = kept[[0, -1]] = True
        return Curve(self.steps[kept], self.seconds[kept], self.values[kept])


def _firsts(values: Array, edges: Array) -> Array:
    """The index of the first lowest value of each stretch that begins at an edge."""
    lowest = np.repeat(np.minimum.reduceat(values, edges), np.diff(np.append(edges, len(values))))
    found = np.flatnonzero(values == lowest)
    return found[np.searchsorted(found, edges)]


class Packed:
    """Arrays of float32 or float64 in one compressed text; equal arrays are stored once."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(4, wbits=31)  # gzip
        self._compressed: list[bytes] = []
        self._known: dict[bytes, list[int]] = {}
        self._size = 0

    def add(self, values: Array) -> list[int]:
        """Store ``values`` as float32. Returns where they are: offset in bytes, count, and bytes of an element."""
        # An infinity stays one, and nothing else becomes one.
        return self._put(np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values).astype("<f4"))

    def add_increasing(self, values: Array) -> list[int]:
        """Store ``values`` so that they stay different: as float32 where it holds them exactly, else as float64."""
        short = values.astype("<f4")
        return self._put(short if np.array_equal(short, values) else values.astype("<f8"))

    def _put(self, values: Array) -> list[int]:
        raw = values.tobytes()
        key = hashlib.blake2b(raw).digest()
        if key not in self._known:
            self._known[key] = [self._size, len(values), values.itemsize]
            raw += b"\0" * (-len(raw) % 8)
            self._size += len(raw)
            self._compressed.append(self._compressor.compress(raw))
        return self._known[key]

    def text(self) -> str:
        """All of them: base64 of gzip. Called once."""
        return base64.b64encode(b"".join((*self._compressed, self._compressor.flush()))).decode()


def share(curves: Sequence[Curve], limit: int) -> int:
    """How many points each curve may have so that all together have about ``limit``: short ones keep all of theirs."""
    left, lengths = limit, sorted(map(len, curves))
    for index, length in enumerate(lengths):
        fair = left // (len(lengths) - index)
        if length > fair:
            return max(4, fair)
        left -= length
    return max(lengths, default=0)
