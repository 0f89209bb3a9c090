"""Deals the positions of an epoch's order to the ranks and their micro-batches: pure arithmetic on position and world size.

Global batch ``i`` of an epoch is ``order[i*G:(i+1)*G]`` with ``G = batch_size * world_size * window``. Each rank takes its share of a global
batch in at most ``window`` micro-batches. A short last global batch is divided as evenly as possible; a rank without samples repeats
some at weight 0, so that all ranks run the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WindowRanges = tuple[list[range], list[list[range]]]
"""One rank's micro-batches of a window as ranges of positions, and the ranges of all ranks as ``[micro-batch][rank]`` (empty: all are full)."""


@dataclass(frozen=True)
class Deal:
    """The distribution of an epoch's units to the ranks. A unit is a sample, or a whole batch if the user's batches are kept."""

    units: int
    batch: int
    """The number of units in a full micro-batch."""
    window: int = 1
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    """Drop the units that do not fill a micro-batch on every rank."""
    limit: int | None = None
    """The maximum number of micro-batches per rank."""

    @property
    def round(self) -> int:
        """The number of units in one full micro-batch of every rank."""
        return self.batch * self.world_size

    @property
    def used(self) -> int:
        """The number of units (samples or batches) used in one epoch."""
        units = self.units - self.units % self.round if self.drop_last else self.units
        return units if self.limit is None else min(units, self.limit * self.round)

    @property
    def steps(self) -> int:
        """The number of windows in an epoch."""
        return -(-self.used // (self.round * self.window))

    def __len__(self) -> int:
        """The number of micro-batches of each rank in an epoch."""
        return -(-self.used // self.round)

    def windows(self, start: int = 0) -> Iterator[WindowRanges]:
        """Yield each window from position ``start`` (in units) on.

        A window has this rank's micro-batches as ranges of positions, and the ranges of all ranks as ``[micro-batch][rank]``.
        In a full window all micro-batches are full, and the second list is empty.
        """
        full, offset, round_ = self.round * self.window, self.rank * self.batch, self.round
        used, batch = self.used, self.batch
        for base in range(start, used, full):
            if base + full <= used:
                yield [range(low, low + batch) for low in range(base + offset, base + full, round_)], []
            else:
                dealt = self._short_window(base, used - base)
                spare = next(part for micro in dealt for part in micro if part)
                yield [micro[self.rank] or spare for micro in dealt], dealt

    def _short_window(self, base: int, count: int) -> list[list[range]]:
        """Deal a short window: full rounds first, as in any window; the rest is split so that the ranks' shares differ by at most one unit.

        Each round (one micro-batch of every rank) is a slice of the order, divided from rank 0 on, so the ranks' outputs, joined round by
        round, are in the data's order.
        """
        rounds, remainder = divmod(count, self.round)
        part, larger = divmod(remainder, self.world_size)
        last = base + rounds * self.round
        edges = [last + r * part + min(r, larger) for r in range(self.world_size + 1)]
        lows = [[base + j * self.round + r * self.batch for r in range(self.world_size)] for j in range(rounds)]
        dealt = [[range(low, low + self.batch) for low in row] for row in lows]
        return [*dealt, list(map(range, edges, edges[1:]))] if remainder else dealt


@dataclass(frozen=True)
class Shards:
    """The use of an epoch's units when each rank has its own already. A position counts units of all ranks, the same number from each."""

    units: tuple[int, ...]
    """The number of units on each rank."""
    batch: int
    window: int
    rank: int
    drop_last: bool = False
    """Drop a rank's units that do not fill a micro-batch."""
    limit: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.units)

    @property
    def round(self) -> int:
        return self.batch * self.world_size

    @property
    def used(self) -> int:
        """The position at the end of the epoch."""
        return len(self) * self.round

    def __len__(self) -> int:
        """The number of micro-batches of each rank in an epoch: that of the rank with the most data. Other ranks repeat some."""
        micro_batches = -(-max(self._units_used()) // self.batch)
        return micro_batches if self.limit is None else min(micro_batches, self.limit)

    def windows(self, start: int = 0) -> Iterator[WindowRanges]:
        """Yield windows like :meth:`Deal.windows`, with ranges of each rank's own units. The second list is never empty.

        Raises:
            ValueError: this rank has no units while others do.
        """
        by_rank = self._units_used()
        spare = range(min(self.batch, by_rank[self.rank]))
        lows = range(start // self.world_size, len(self) * self.batch, self.batch)
        if lows and not spare:
            raise ValueError(
                f"rank {self.rank} has no batch in its share of the data while other ranks do: give every rank some data"
            )
        for first in range(0, len(lows), self.window):
            dealt = [
                [range(min(low, units), min(low + self.batch, units)) for units in by_rank]
                for low in lows[first : first + self.window]
            ]
            yield [micro[self.rank] or spare for micro in dealt], dealt

    def _units_used(self) -> list[int]:
        return [units - units % self.batch if self.drop_last else units for units in self.units]
