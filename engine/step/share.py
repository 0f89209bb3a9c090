"""The weight of a micro-batch in its window."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Share(NamedTuple):
    """The weight of one micro-batch."""

    size: int
    """Samples in it; 0 for a repeated micro-batch that only keeps the collectives matched; -1: not determined yet, see the batch."""
    divisor: float
    """The divisor of its mean loss, such that the average over ranks of the window's sum is the mean over all samples."""
    alone: float
    """The same for a loop without accumulation: as if this micro-batch were its own window."""
    last: bool
    """Whether it closes its window."""
    repeats: bool = False
    """Whether some rank repeats a micro-batch in this window."""
    samples: int = -1
    """Samples in the window, over all ranks; -1: those of this micro-batch, see the batch."""


ALONE = Share(size=-1, divisor=1.0, alone=1.0, last=True)
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
