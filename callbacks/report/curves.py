"""The points of a curve: collected, thinned without losing a peak, and packed for a page."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Points:
    """Values in the order in which they were recorded."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of training until then; NaN: not recorded."""
    values: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, value: float) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget what came after ``step``."""
        kept = [index for index, each in enumerate(self.steps) if each <= step]
        if len(kept) < len(self.steps):
            self.steps = [self.steps[index] for index in kept]
            self.seconds = [self.seconds[index] for index in kept]
            self.values = [self.values[index] for index in kept]

    def curve(self) -> Curve:
        """Sorted by step, with one value for each: the last one recorded."""
        steps = np.asarray(self.steps, dtype=np.float64)
        order = np.argsort(steps, kind="stable")
        last = np.append(np.diff(steps[order]) > 0, True)
        kept = order[last]
        return Curve(steps[kept], np.asarray(self.seconds)[kept], np.asarray(self.values)[kept])


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
        kept = np.unique(np.concatenate((lowest, highest, (0, count - 1))))
        return Curve(self.steps[kept], self.seconds[kept], self.values[kept])


def _firsts(values: Array, edges: Array) -> Array:
    """The index of the first lowest value of each stretch that begins at an edge."""
    lowest = np.repeat(np.minimum.reduceat(values, edges), np.diff(np.append(edges, len(values))))
    found = np.flatnonzero(values == lowest)
    return found[np.searchsorted(found, edges)]


class Packed:
    """Arrays of float32 or float64 in one compressed text; equal arrays are stored once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._known: dict[bytes, list[int]] = {}
        self._size = 0

    def add(self, values: Array, *, double: bool = False) -> list[int]:
        """Store ``values``; return where they are: offset in bytes, count, and bytes of an element."""
        if double:
            raw = values.astype("<f8").tobytes()
        else:  # an infinity stays one, and nothing else becomes one
            raw = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values).astype("<f4").tobytes()
        if raw not in self._known:
            self._size += -self._size % 8
            self._known[raw] = [self._size, len(values), 8 if double else 4]
            self._parts.append(raw + b"\0" * (-len(raw) % 8))
            self._size += len(self._parts[-1])
        return self._known[raw]

    def text(self) -> str:
        """All of them: base64 of gzip."""
        return base64.b64encode(gzip.compress(b"".join(self._parts), 4, mtime=0)).decode()


def share(curves: Sequence[Curve], limit: int) -> int:
    """How many points each curve may have so that all together have about ``limit``: short ones keep all of theirs."""
    left, lengths = limit, sorted(map(len, curves))
    for index, length in enumerate(lengths):
        fair = left // (len(lengths) - index)
        if length > fair:
            return max(4, fair)
        left -= length
    return max(lengths, default=0)
