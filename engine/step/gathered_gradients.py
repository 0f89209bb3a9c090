"""The state of an optimizer's gradients: what was accumulated, and what was done to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.utils import accelerator

SCALAR, WEIGHTED = 1, 2
"""Kinds of losses: a mean, and ``Loss(sum, count)``."""


class Gathered:
    """The state of one optimizer's gradients since they were last used.

    Optimizers that step together on one loss share one such object.
    """

    __slots__ = (
        "altered",
        "averaged",
        "closed",
        "count",
        "dropped",
        "held",
        "kind",
        "optimizers",
        "ready",
        "scalars",
        "total",
        "used",
    )

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self.optimizers = list(optimizers)
        self.kind = 0
        """The kind of the losses that the ranks agreed on; 0: not known yet."""
        self.held = False
        """The latest ``accumulate`` block did not close its window: no step and no clearing until the next one."""
        self.used = False
        """A step has used the gradients."""
        self.open()

    def open(self) -> None:
        """Reset, before other gradients are accumulated."""
        self.count: Tensor | float | None = None
        """Items of the ``Loss`` objects so far, on this rank."""
        self.scalars = False
        self.dropped = 0.0
        """The fraction of the window whose micro-batches had no loss; known on one process only."""
        self.closed = False
        """:attr:`total` is known: the next backward pass opens another window."""
        self.total: Tensor | float | None = None
        """What the gradients are still to be divided by; ``None``: nothing."""
        self.ready: dict[int, Tensor | None] = {}
        """Optimizers (by id) whose gradients are divided and unscaled, with a flag (1.0: not finite) where one was needed."""
        self.altered = False
        """Finishing has changed them, but the step has not come: another backward pass would mix two scales."""
        self.averaged = False
        """They are averaged over the ranks explicitly (manual optimization)."""

    def cleared(self) -> None:
        """The gradients were set to zero."""
        self.open()
        self.used = False

    def add(self, count: Tensor | float) -> None:
        self.count = count if self.count is None else _wide(self.count) + count


def _wide(count: Tensor | float) -> Tensor | float:
    """A count that can be added to: sums in half formats and small integers would be rounded, or overflow."""
    if isinstance(count, Tensor) and count.dtype not in (torch.float32, torch.float64, torch.int64):
        return count.to(accelerator.wide(count.device))
    return count


def packed(count: Tensor | float | None, fed: bool, device: torch.device) -> Tensor:
    """A rank's items and whether it had a loss: always a tensor on the device, so that all ranks use the same backend. Shape [2], fp64."""
    if isinstance(count, Tensor):
        count = count.to(device, accelerator.wide(device), non_blocking=True).reshape(())
        return torch.stack([count, torch.full_like(count, float(fed))])
    return torch.tensor([count or 0.0, float(fed)], dtype=accelerator.wide(device)).to(device, non_blocking=True)
