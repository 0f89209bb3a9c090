"""Skipped optimizer steps: told at the first one, counted, and an error when too many follow each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from engine.utils.log import logger

IN_A_ROW = 100
"""The default of ``max_skipped_steps``."""
SMALLEST_SCALE = 1.0
"""The loss scale of fp16 at which skipped steps begin to count as too many: above it a skipped step lowers the scale, and the next may fit."""


class SkippedSteps:
    """Counts the steps that were skipped because a gradient was not finite (by fp16's scaler or ``on_nonfinite="skip"``), not those of a guard.

    :class:`engine.step.verdicts.Verdicts` reports each of them here, on all ranks alike.
    """

    def __init__(self) -> None:
        self.count = 0
        """The number of skipped steps so far; a resumed run continues it."""
        self.limit: int | None = IN_A_ROW
        """The number of skipped steps in a row that is an error; ``None``: no limit."""
        self.is_told_here = True
        """Whether this process logs the first skipped step."""
        self.in_a_row: dict[int, int] = {}
        """By id of the first of the optimizers that step together, how many of their steps were skipped since the latest applied one."""
        self.is_told = False
        """Whether :meth:`warn_of_first` was called."""

    def add(self, optimizers: Sequence[Optimizer]) -> int:
        """Count a skipped step of ``optimizers``; return how many of their steps were skipped in a row."""
        key = id(optimizers[0]) if optimizers else 0
        self.count += 1
        self.in_a_row[key] = in_a_row = self.in_a_row.get(key, 0) + 1
        return in_a_row

    def applied(self, optimizers: Sequence[Optimizer]) -> None:
        """Note that a step of ``optimizers`` was applied."""
        self.in_a_row.pop(id(optimizers[0]) if optimizers else 0, None)

    def warn_of_first(self, reason: str, where: str) -> None:
        """Warn at the first skipped step. ``reason``: the rule that skipped it; ``where``: the end of the message, with names of parameters."""
        self.is_told = True
        if not self.is_told_here:
            return
        next_rule = (
            "no number of them in a row is an error (max_skipped_steps=None)"
            if self.limit is None
            else f"max_skipped_steps={self.limit} in a row are an error"
        )
        logger.warning(
            "an optimizer step was skipped, because a gradient is not finite (%s)%s. Later ones are only counted (skipped_steps in the metrics and "
            "the result), and %s",
            reason,
            where,
            next_rule,
        )
