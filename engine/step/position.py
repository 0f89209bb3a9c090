"""The position of a loop in its accumulation window: the share of the current micro-batch, and whether more of them come before the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple


class Share(NamedTuple):
    """The weight of one micro-batch."""

    size: int
    """Samples in the micro-batch; 0 for a repeated one that only keeps the collectives matched; -1: not known, to be read from the batch."""
    divisor: float
    """Divisor for the micro-batch's mean loss; with it, the window's sum, averaged over ranks, is the mean over all samples."""
    alone: float
    """Divisor for the mean loss if the micro-batch is a window of its own, in loops without accumulation."""
    last: bool
    """Whether the micro-batch is the last of its window."""
    repeats: bool = False
    """Whether some rank repeats a micro-batch in this window."""
    samples: int = -1
    """Samples in the window, over all ranks; -1: not known, the samples of this batch."""
    empty: bool = False
    """Whether the micro-batch has no samples; a repeated one does not count as empty."""
    guess: str = ""
    """Why the micro-batch's size is a guess; empty: it is none."""


NOT_FROM_LOADER = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""The share of a batch that does not come from a prepared loader."""


@lru_cache(maxsize=1024)
def shares(sizes: tuple[tuple[int, ...], ...], rank: int) -> tuple[Share, ...]:
    """The shares of one window on ``rank``. ``sizes[j][r]`` is the number of samples in micro-batch ``j`` of rank ``r``."""
    world_size = len(sizes[0])
    total, repeats = sum(map(sum, sizes)), any(0 in micro for micro in sizes)
    return tuple(
        Share(
            size=micro[rank],
            divisor=total / (micro[rank] * world_size) if micro[rank] else 1.0,
            alone=sum(micro) / (micro[rank] * world_size) if micro[rank] else 1.0,
            last=j == len(sizes) - 1,
            repeats=repeats,
            samples=total,
        )
        for j, micro in enumerate(sizes)
    )


def share_of(shares_here: tuple[Share, ...], index: int, guess: str, repeated: bool) -> Share:
    """A micro-batch's share, of those of its window: with a guess, and marked if it is empty."""
    share = shares_here[index]
    if guess or (not share.size and not repeated):
        return share._replace(empty=not share.size and not repeated, guess=guess)
    return share


class Position:
    """The position of a loop in its accumulation window.

    Args:
        size: micro-batches in a full window.
    """

    __slots__ = ("accumulating", "complete", "counted", "held", "passes", "reduced_passes", "share", "size")

    def __init__(self, size: int = 1) -> None:
        self.size = size
        """Micro-batches in a full window (``accumulate_grad_batches``)."""
        self.share: Share = NOT_FROM_LOADER
        """The current micro-batch's share."""
        self.accumulating = False
        """Whether micro-batches have their weight in the window (``Share.divisor``), not ``Share.alone``: inside ``accumulate``, and in a run."""
        self.held = False
        """Whether the latest ``accumulate`` block left its window open, and no backward pass followed."""
        self.complete = False
        """Whether the latest backward pass was of a window's last micro-batch."""
        self.counted = 0
        """Micro-batches of accumulating loops that came without a prepared loader."""
        self.passes = 0
        """Backward passes that have begun."""
        self.reduced_passes: float = math.inf
        """The number of :attr:`passes` after which the strategy must look at each one, because it may reduce no gradients by itself."""

    def begin_pass(self, accumulating: bool) -> None:
        """Begin a run's pass over its data, whose micro-batches are not entered one by one."""
        self.accumulating = accumulating

    def end_pass(self) -> None:
        """End a run's pass over its data."""
        self.accumulating, self.share = False, NOT_FROM_LOADER

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside the block micro-batches of another pass begin, as in a validation; afterwards the current micro-batch is the one from before."""
        outer = self.share
        try:
            yield
        finally:
            self.share = outer

    def discard(self) -> None:
        """End the window without a step: the next micro-batch is the first of a window."""
        self.held, self.counted = False, 0
