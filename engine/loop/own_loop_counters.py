"""Counters of a run for a checkpoint that a user's own loop saved with ``Engine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.loop.state import TrainState


def state_of_loop(
    where: object,
    loaders: list[Any],
    facts: Mapping[str, Any],
    batches: int | None,
    window_at: Callable[[int], int],
    stride: int,
) -> TrainState:
    """The counters for a checkpoint of ``Engine.save_state``.

    Args:
        where: the checkpoint, for errors.
        loaders: its loaders' positions; the first is the training data's.
        facts: the loop's facts: ``step``, if given, is the number of optimizer steps. Otherwise each window counts as one.
        batches: micro-batches of an epoch, if known.
        window_at: micro-batches of a window, by epoch.
        stride: what one micro-batch adds to the position.

    Raises:
        ValueError: the position in the data, or the number of steps, is unknown.
    """
    only = "load only its weights with Resume(path, weights_only=True)"
    if not loaders:
        raise ValueError(
            f"{where} was saved by a loop that prepared no loader, so its position in the data is unknown: {only}"
        )
    epoch, position = loaders[0]["epoch"], loaders[0]["position"]
    index, step = position // stride, facts.get("step")
    if type(step) is not int:
        if epoch and batches is None:
            raise ValueError(
                f"{where} was saved by a loop over data without a length, so its number of steps is unknown: save it with "
                f'save_state(path, facts={{"step": n}}), or {only}'
            )
        step = sum(-(-(batches or 0) // window_at(each)) for each in range(epoch)) + -(-index // window_at(epoch))
    samples = epoch * (loaders[0]["samples"] or 0) + position
    return TrainState(epoch, step, index, epoch * (batches or 0) + index, position, index, samples=samples)
