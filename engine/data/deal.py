"""The parts of an epoch's order that each rank gets, and in which micro-batch: pure arithmetic over (position, world).

Global batch ``i`` of an epoch is ``order[i*G:(i+1)*G]`` with ``G = batch_size * world_size * window``. Each rank takes its share of it in at
most ``window`` micro-batches. A short last global batch is divided as evenly as possible; a rank without samples repeats
some at weight 0, so that all ranks run the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WindowRanges = tuple[list[range], list[list[range]]]
"""A window's micro-batches of one rank as ranges of positions, and ``[micro-batch][rank]`` of all (empty: all of them are full)."""


@dataclass(frozen=True)
class Deal:
    """How an epoch's units are distributed to the ranks; a unit is a sample, or a whole batch if the user's batches are kept."""

    units: int
    batch: int
    """Units in a full micro-batch."""
    window: int = 1
    world_size: int = 1
    rank: int = 0
    drop_last: bool = False
    """Drop the units that do not fill a micro-batch on every rank."""
    limit: int | None = None
    """The maximum number of micro-batches per rank."""

    @property
    def round(self) -> int:
        """Units in one micro-batch of every rank."""
        return self.batch * self.world_size

    @property
    def used(self) -> int:
        """Units that are trained on in an epoch."""
        units = self.units - self.units % self.round if self.drop_last else self.units
        return units if self.limit is None else min(units, self.limit * self.round)

    @property
    def steps(self) -> int:
        """Windows in an epoch."""
        return -(-self.used // (self.round * self.window))

    def __len__(self) -> int:
        """Micro-batches of each rank in an epoch."""
        return -(-self.used // self.round)

    def windows(self, start: int = 0) -> Iterator[WindowRanges]:
        """Yield each window from position ``start`` (in units) on.

        A window is this rank's micro-batches as ranges of positions, and the ranges of all ranks, ``[micro-batch][rank]``.
        For a full window only this rank's ranges are listed (the second list is empty): all its micro-batches are full.
        """
        full, offset, round_ = self.round * self.window, self.rank * self.batch, self.round
        used, batch = self.used, self.batch
        for base in range(start, used, full):
            if base + full <= used:
                yield [range(low, low + batch) for low in range(base + offset, base + full, round_)], []
            else:
                dealt = self._short(base, used - base)
                spare = next(part for micro in dealt for part in micro if part)
                yield [micro[self.rank] or spare for micro in dealt], dealt

    def _short(self, base: int, count: int) -> list[list[range]]:
        """A short window: full rounds first, as in any window; the rest is split evenly, so that shares differ by at most one unit.

        Each round is a slice of the order, divided from rank 0 on: the ranks' outputs, joined round by round, are in the data's order.
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
    """How an epoch's units are used when each rank has its own already. Positions count the units of all ranks, equally many of each."""

    units: tuple[int, ...]
    """The number of units on each rank."""
    batch: int
    window: int
    rank: int
    drop_last: bool = False
    """Drop units that do not fill a micro-batch of their rank."""
    limit: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.units)

    @property
    def round(self) -> int:
        return self.batch * self.world_size

    @property
    def used(self) -> int:
        """The position of the end."""
        return len(self) * self.round

    def __len__(self) -> int:
        """Micro-batches per rank in an epoch: as many as the rank with the most has, while others repeat some."""
        micro_batches = -(-max(self._units_used()) // self.batch)
        return micro_batches if self.limit is None else min(micro_batches, self.limit)

    def windows(self, start: int = 0) -> Iterator[WindowRanges]:
        """The windows from position ``start`` on, like :meth:`Deal.windows`, with ranges of each rank's own units; every window lists all ranks.

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
