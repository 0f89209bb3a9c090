"""How many optimizer steps a training makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MANY = 10_000
"""Epochs whose windows are looked up one by one; later ones have the window of the last of them."""


def steps_of(batches: int, epochs: int, window_at: Callable[[int], int]) -> int:
    """The steps of so many ``epochs`` of ``batches`` micro-batches, in windows that may depend on the epoch."""
    each = [-(-batches // window_at(epoch)) for epoch in range(min(epochs, MANY))]
    return sum(each) + (epochs - len(each)) * (each[-1] if each else 0)


def total_steps(run: Any) -> int | None:
    """See :attr:`engine.Run.total_steps`."""
    if run.stage not in ("fit", "sanity"):
        return None
    if run.train_loader is None and "find_train_loader" in vars(run):  # it is not after the run's end
        run.find_train_loader()
    limit: int | None = run.max_steps
    if run.max_epochs is None or run.num_train_batches is None:
        return limit
    steps = steps_of(run.num_train_batches, run.max_epochs, run.window_at)
    return steps if limit is None else min(steps, limit)
