"""The draws of a mixture as numbers: which source each draw reads, and which of the source's samples. All of it is a function of (seed, draw)."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

import numpy as np
import torch

from engine.data.order import mixed
from engine.data.source_order import Numbers, SourceOrder, seed_of_source

_BLOCK = 1024
_BLOCKS_KEPT = 16


def apportion(weights: Sequence[int], count: int) -> list[int]:
    """Divide the first ``count`` draws among sources by their weights.

    Sample ``k`` of a source with weight ``w`` comes at the time ``(k + 1/2) / w`` (Webster's method), so the counts never fall while ``count``
    grows, and differ from the exact shares by at most half the number of sources. Of equal times the earlier source comes first.
    """
    total = sum(weights)
    counts = [(2 * count * weight + total) // (2 * total) for weight in weights]
    surplus = sum(counts) - count
    if surplus > 0:  # the samples that come last are too many
        last = [(-Fraction(2 * n - 1, w), -s) for s, (n, w) in enumerate(zip(counts, weights, strict=True)) if n]
        heapq.heapify(last)
        for _ in range(surplus):
            s = -last[0][1]
            counts[s] -= 1
            key = (-Fraction(2 * counts[s] - 1, weights[s]), -s)
            heapq.heapreplace(last, key) if counts[s] else heapq.heappop(last)
    elif surplus < 0:
        following = [(Fraction(2 * n + 1, w), s) for s, (n, w) in enumerate(zip(counts, weights, strict=True)) if w]
        heapq.heapify(following)
        for _ in range(-surplus):
            s = following[0][1]
            counts[s] += 1
            heapq.heapreplace(following, (Fraction(2 * counts[s] + 1, weights[s]), s))
    return counts


@dataclass(frozen=True)
class Stage:
    """The shares that hold from draw ``start`` on; they add up to 1."""

    start: int
    shares: tuple[Fraction, ...]
    weights: tuple[int, ...] = field(init=False, compare=False)
    """The shares as whole numbers."""

    def __post_init__(self) -> None:
        scale = lcm(*(share.denominator for share in self.shares))
        object.__setattr__(self, "weights", tuple(int(share * scale) for share in self.shares))


@dataclass(frozen=True)
class Origin:
    """Where the arithmetic of a mixture begins: at draw 0, or where a resume has changed the mixture."""

    draw: int = 0
    counts: tuple[int, ...] = ()
    """By source, its samples in the draws before :attr:`draw`."""
    epoch: int = 0
    """An epoch that begins with draw :attr:`first`; epochs after it follow without a gap."""
    first: int = 0


class Block:
    """Consecutive draws that are computed together: ``sources`` and ``indices`` of the draws from ``low`` to ``high``."""

    __slots__ = ("before", "high", "indices", "low", "source_array", "sources")

    def __init__(self, low: int, before: Sequence[int], sources: Numbers, indices: Numbers) -> None:
        self.low, self.high, self.before = low, low + len(sources), before
        self.source_array = sources
        self.sources: list[int] = sources.tolist()
        self.indices: list[int] = indices.tolist()


class MixtureDraws:
    """The draws of a mixture.

    Counts are exact at the ends of epochs, at the starts of stages, and between these after every block of about 1,024 draws: they are those of
    :func:`apportion`, counted from the start of the stage. Inside a block the draws are in a random order, or evenly spread without a shuffle.

    Args:
        sizes: for each source, pairs of a draw's number and the samples that it has from there on (:class:`engine.data.source_order.SourceOrder`);
            ``None``: the source is not read by index, and the number of the draw is the index.
        stages: in the order of their starts; the first starts at 0.
        length: the draws in an epoch.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[Sequence[tuple[int, int]] | None],
        stages: Sequence[Stage],
        length: int,
        origin: Origin,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.names, self.stages, self.length, self.origin = names, stages, length, origin
        self.seed, self.shuffle = seed, shuffle
        self.orders = [
            None if size is None else SourceOrder(size, seed_of_source(seed, name), shuffle)
            for name, size in zip(names, sizes, strict=True)
        ]
        self.block_size = max(_BLOCK, 256 * len(names))
        self._starts = [stage.start for stage in stages]
        self._blocks: dict[int, Block] = {}

    def start_of(self, epoch: int) -> int:
        """The first draw of an epoch."""
        return self.origin.first + (epoch - self.origin.epoch) * self.length

    def stage_at(self, draw: int) -> Stage:
        """The stage that a draw belongs to."""
        return self.stages[bisect_right(self._starts, draw) - 1]

    def block(self, draw: int) -> Block:
        """The block of a draw.

        Raises:
            ValueError: the draw came before a resume that has changed the mixture.
        """
        low, high = self._edges(draw)
        block = self._blocks.get(low)
        if block is None:
            if len(self._blocks) >= _BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
            block = self._blocks[low] = self._computed(low, high)
        return block

    def counts(self, draws: int) -> list[int]:
        """By source, its samples in the first ``draws`` draws."""
        if draws == self.origin.draw:
            return list(self.origin.counts)
        block = self.block(draws - 1)
        inside = np.bincount(block.source_array[: draws - block.low], minlength=len(self.names))
        return [before + int(count) for before, count in zip(block.before, inside, strict=True)]

    def _edges(self, draw: int) -> tuple[int, int]:
        """The first draw of the block of ``draw``, and the first one after it. Blocks end at ends of epochs and before starts of stages."""
        origin = self.origin
        if draw < origin.draw:
            raise ValueError(
                f"draw {draw} of the mixture came before draw {origin.draw}, where a resume has changed its sources or weights: what it was is not "
                "known here; ask the mixture as it was before"
            )
        stage = bisect_right(self._starts, draw)
        epoch_start = self.start_of(origin.epoch + (draw - origin.first) // self.length)
        start = max(self._starts[stage - 1], epoch_start, origin.draw)
        end = min([epoch_start + self.length, *self._starts[stage : stage + 1]])
        blocks = max(1, (end - start) // self.block_size)  # the last one is longer
        number = min((draw - start) // self.block_size, blocks - 1)
        low = start + number * self.block_size
        return low, end if number == blocks - 1 else low + self.block_size

    def _totals(self, draws: int) -> list[int]:
        """By source, its samples in the first ``draws`` draws, at the edge of a block."""
        counts = list(self.origin.counts)
        for stage, end in zip(self.stages, [*self._starts[1:], draws], strict=True):
            number = min(end, draws) - max(stage.start, self.origin.draw)
            if number > 0:
                counts = [a + b for a, b in zip(counts, apportion(stage.weights, number), strict=True)]
        return counts

    def _computed(self, low: int, high: int) -> Block:
        before, after = self._totals(low), self._totals(high)
        numbers = [b - a for a, b in zip(before, after, strict=True)]
        sources = np.repeat(np.arange(len(self.names)), numbers)
        if self.shuffle:
            generator = torch.Generator(device="cpu").manual_seed(mixed(self.seed, low))
            sources = sources[torch.randperm(high - low, generator=generator, device="cpu").numpy()]
        else:
            weights, start = self.stage_at(low).weights, max(self.stage_at(low).start, self.origin.draw)
            earlier = apportion(weights, low - start)
            times = [
                (np.arange(2 * n + 1, 2 * (n + number) + 1, 2) / float(weight) if number else np.empty(0))
                for n, number, weight in zip(earlier, numbers, weights, strict=True)
            ]
            sources = sources[np.argsort(np.concatenate(times), kind="stable")]
        indices = np.empty(high - low, np.int64)
        parts = [
            np.arange(a, b) if order is None else order.read(a, b)
            for order, a, b in zip(self.orders, before, after, strict=True)
        ]
        indices[np.argsort(sources, kind="stable")] = np.concatenate(parts)
        return Block(low, before, sources, indices)


# -- the length of an epoch -----------------------------------------------------------------------------------------------------------------


def draws_of_epoch(stages: Sequence[Stage], sizes: Sequence[int], stop: str) -> int:
    """The draws in an epoch of a mixture.

    With ``stop="first_exhausted"`` an epoch is as long as no source's share of it is larger than the source; with ``"all_exhausted"`` it is as
    short as every source's share is at least as large, of those that have one.

    Raises:
        ValueError: the epoch has no end, because a source that is left out in the last stage is never read whole.
    """
    is_used = [any(stage.shares[s] for stage in stages) for s in range(len(sizes))]

    def amounts(draws: int) -> list[tuple[Fraction, int, int]]:
        """For each source that is used: its exact share of the first draws, its samples in them, and its size."""
        exact, counts = [Fraction(0)] * len(sizes), [0] * len(sizes)
        for stage, end in zip(stages, [*(later.start for later in stages[1:]), draws], strict=True):
            number = min(end, draws) - stage.start
            if number > 0:
                exact = [a + share * number for a, share in zip(exact, stage.shares, strict=True)]
                counts = [a + b for a, b in zip(counts, apportion(stage.weights, number), strict=True)]
        return [row for row, used in zip(zip(exact, counts, sizes, strict=True), is_used, strict=True) if used]

    def is_within(draws: int) -> bool:
        if stop == "first_exhausted":
            return all(exact <= size and count <= size for exact, count, size in amounts(draws))
        return any(exact < size or count < size for exact, count, size in amounts(draws))

    low, high = 0, 1
    while is_within(high):
        low, high = high, 2 * high
        if high > 2**62:
            raise ValueError(
                "an epoch of this mixture has no end: a source is not read whole, because the last stage leaves it out. Give samples=, the draws in "
                "an epoch, or stop='first_exhausted'"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return max(1, low) if stop == "first_exhausted" else high


def share_texts(names: Sequence[str], shares: Sequence[Fraction]) -> dict[str, str]:
    """Shares by name as text, for a state."""
    return {name: str(share) for name, share in zip(names, shares, strict=True)}


def percentages(names: Sequence[str], shares: Sequence[Fraction]) -> str:
    """Shares by name, for readers: ``"web 40 %, code 60 %"``; sources without a share are left out."""
    return ", ".join(f"{name} {float(100 * share):.3g} %" for name, share in zip(names, shares, strict=True) if share)


def shares_of_texts(names: Sequence[str], texts: Mapping[str, str]) -> tuple[Fraction, ...]:
    """The opposite of :func:`share_texts`; sources that are not in ``texts`` have no share."""
    return tuple(Fraction(texts.get(name, "0")) for name in names)
