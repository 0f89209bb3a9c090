"""The order in which a mixture reads one of its sources: pass by pass, each sample once in a pass, also when the source changes its size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.data.order import FeistelIndices, mixed, permutation

Numbers = NDArray[np.int64]
COMPUTED_FROM = 2**20
"""The number of samples from which on a pass is computed index by index (:class:`engine.data.order.FeistelIndices`): below it a list takes 4 MiB at
most. Orders in checkpoints depend on it."""
_COMPUTED_AT_ONCE = 8192
"""Indices of such a pass that are computed together, since few of them take as long."""
_LISTED = 2**24
"""The largest rest of a pass that is listed when a source has shrunk (128 MiB)."""
_ADDED = 1 << 62
"""Added to the index of the first added sample for their seed, so that no pass has it."""


def seed_of_source(seed: int, name: str) -> int:
    """The seed of a source's passes: a function of its name, so that other sources may come and go."""
    return mixed(seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


class Passes:
    """Whole passes over ``size`` samples, one after the other without an end.

    Args:
        start: the number of the draw with which pass ``first`` begins.
    """

    def __init__(self, start: int, size: int, first: int, seed: int, shuffle: bool) -> None:
        self.start, self.size, self.first, self.seed, self.shuffle = start, size, first, seed, shuffle
        self.stop: int | None = None
        """The draw before which these passes end; ``None``: they do not."""
        self._orders: dict[int, Any] = {}
        self._computed: tuple[int, int, Numbers] = (-1, 0, np.empty(0, np.int64))
        """The pass and the place of indices that were computed together, and these."""

    def passes_before(self, number: int) -> int:
        """The number of the pass that draw ``number`` belongs to."""
        return self.first + (number - self.start) // self.size

    def end_of_pass(self, number: int) -> int:
        """The first draw after the pass of draw ``number - 1``; ``number`` itself, if a pass ends there."""
        return number + (self.start - number) % self.size

    def read(self, low: int, high: int) -> Numbers:
        """The indices of the draws from ``low`` to ``high``."""
        parts = []
        while low < high:
            number, place = divmod(low - self.start, self.size)
            stop = min(place + high - low, self.size)
            parts.append(self._indices(self.first + number, place, stop))
            low += stop - place
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _indices(self, number: int, low: int, high: int) -> Numbers:
        if not self.shuffle:
            return np.arange(low, high, dtype=np.int64)
        if number not in self._orders:
            self._orders = {n: order for n, order in self._orders.items() if n == number - 1}
            self._orders[number] = (
                FeistelIndices(self.size, self.seed, number)
                if self.size >= COMPUTED_FROM
                else permutation(self.size, self.seed, number).numpy().astype(np.int32)
            )
        order = self._orders[number]
        if not isinstance(order, FeistelIndices):
            return np.asarray(order[low:high], np.int64)
        parts = []
        while low < high:
            first = low - low % _COMPUTED_AT_ONCE
            if self._computed[:2] != (number, first):
                stop = min(first + _COMPUTED_AT_ONCE, self.size)
                entries = order.entries_at(torch.arange(first, stop, device="cpu")).numpy()
                self._computed = number, first, entries
            part = self._computed[2][low - first : high - first]
            parts.append(part)
            low += len(part)
        return np.concatenate(parts)


class Added:
    """Samples that a source has got within a pass, which are read once, after the others.

    Args:
        low: the index of the first of them.
    """

    def __init__(self, start: int, low: int, count: int, seed: int, shuffle: bool) -> None:
        self.start, self.stop, self.low = start, start + count, low
        self._passes = Passes(start, count, 0, mixed(seed, _ADDED + low), shuffle)

    def read(self, low: int, high: int) -> Numbers:
        """The indices of the draws from ``low`` to ``high``."""
        return self._passes.read(low, high) + self.low


class Rest:
    """The rest of a pass, as a list of indices."""

    def __init__(self, start: int, indices: Numbers) -> None:
        self.start, self.stop, self.indices = start, start + len(indices), indices

    def read(self, low: int, high: int) -> Numbers:
        """The indices of the draws from ``low`` to ``high``."""
        return self.indices[low - self.start : high - self.start]


class SourceOrder:
    """The indices of a source's draws 0, 1, 2, ...: in each pass every sample once, in an order that is a function of (seed, pass).

    Args:
        sizes: pairs of a draw's number and the number of samples that the source has from this draw on. Each size after the first is a change:
            the pass that has begun reads what it has not read, the added samples last.
        shuffle: ``False``: each pass is in the source's order.

    If a source has shrunk within a pass, that pass goes on without the samples that are gone; if its rest has more than :data:`_LISTED` samples, a
    new pass begins (:attr:`cut`).
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], seed: int, shuffle: bool) -> None:
        (start, size), *changes = sizes
        self.cut = False
        """Whether a pass was not read to its end, because the source has shrunk."""
        self._seed, self._shuffle = seed, shuffle
        self._last = Passes(start, size, 0, seed, shuffle)
        self._parts: list[Passes | Added | Rest] = [self._last]
        for count, new_size in changes:
            self._change(count, new_size)

    def _change(self, count: int, size: int) -> None:
        """Give the source ``size`` samples from draw ``count`` on."""
        last, old_size = self._last, self._last.size
        end = last.end_of_pass(count) if count > last.start else last.start
        number = last.passes_before(end)
        if size >= old_size:
            last.stop = end
            if end > count or count < last.start:  # a pass has begun
                self._parts.append(Added(end, old_size, size - old_size, self._seed, self._shuffle))
                end += size - old_size
        else:
            is_long = end - count > _LISTED
            self.cut = self.cut or is_long
            remaining = np.empty(0, np.int64) if is_long else self.read(count, end)
            remaining = remaining[remaining < size]
            # Parts that end before the change stay, so that earlier draws are still known.
            self._parts = [part for part in self._parts if part.start < count]
            for part in self._parts:
                part.stop = count if part.stop is None else min(part.stop, count)
            self._parts.append(Rest(count, remaining))
            end = count + len(remaining)
        self._last = Passes(end, size, number, self._seed, self._shuffle)
        self._parts.append(self._last)

    def read(self, low: int, high: int) -> Numbers:
        """The indices of the draws from ``low`` to ``high``."""
        if low >= self._last.start:
            return self._last.read(low, high)
        pieces = []
        for part in self._parts:
            first, stop = max(low, part.start), high if part.stop is None else min(high, part.stop)
            if first < stop:
                pieces.append(part.read(first, stop))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def end_of_pass(self, number: int) -> int:
        """The first draw after the pass that draw ``number`` belongs to."""
        last = self._last
        return last.start if number < last.start else last.end_of_pass(number + 1)
