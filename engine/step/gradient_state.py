"""The state of one optimizer's gradients between two of its steps: what their losses weighed, and what was done to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.utils import accelerator

SCALAR, WEIGHTED = 1, 2
"""Kinds of losses: a scalar, which is a mean, and ``Loss(sum, count)``."""


class GradientState:
    """The state of one optimizer's gradients since its last step.

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
        """The kind of losses that the ranks agreed on, ``SCALAR`` or ``WEIGHTED``; 0: not known yet."""
        self.held = False
        """Whether the latest ``accumulate`` block left its window open: no step and no clearing until the next block."""
        self.used = False
        """Whether a step has used the gradients."""
        self.open()

    def open(self) -> None:
        """Reset this state before the gradients of another window are accumulated."""
        self.count: Tensor | float | None = None
        """Sum of the counts of this rank's ``Loss`` objects so far; ``None``: there was none."""
        self.scalars = False
        """Whether any loss was a scalar."""
        self.dropped = 0.0
        """The fraction of the window's samples whose micro-batches had no loss; known in a single process only."""
        self.closed = False
        """Whether :attr:`total` is known: the next backward pass then opens another window."""
        self.total: Tensor | float | None = None
        """Divisor that the gradients still need; ``None``: they need no division."""
        self.ready: dict[int, Tensor | None] = {}
        """Optimizers (by id) whose gradients are divided and unscaled, with a flag (1.0: not finite) where one was needed."""
        self.altered = False
        """Whether gradients were divided, unscaled or clipped before their step: another backward pass would now mix two scales."""
        self.averaged = False
        """Whether the ranks average the gradients explicitly (manual optimization)."""

    def cleared(self) -> None:
        """Record that the gradients were set to zero."""
        self.open()
        self.used = False

    def check_unaltered(self) -> None:
        """Check that the gradients to which a backward pass has added had not been changed for a step yet.

        Raises:
            RuntimeError: they were divided, unscaled or clipped for a step that has not happened.
        """
        if self.altered:
            names = ", ".join(type(o).__name__ for o in self.optimizers)
            raise RuntimeError(
                f"this backward pass added to gradients of {names} that were clipped, unscaled or divided already, before their step: "
                "call optimizer.step() or optimizer.zero_grad() before it, or clip after the last backward pass"
            )

    def add(self, count: Tensor | float) -> None:
        """Add the ``count`` of another ``Loss``."""
        self.count = count if self.count is None else _wide(self.count) + count


def _wide(count: Tensor | float) -> Tensor | float:
    """Return ``count`` in a dtype for sums: in half precision and small integers sums would be rounded, or overflow."""
    if isinstance(count, Tensor) and count.dtype not in (torch.float32, torch.float64, torch.int64):
        return count.to(accelerator.wide(count.device))
    return count
