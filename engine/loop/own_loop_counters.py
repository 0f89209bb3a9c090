"""Where a loop of one's own stood when it saved, in the counters of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.loop.result import TrainState


def state_of_loop(
    where: object, loaders: list[Any], facts: Mapping[str, Any], batches: int | None, window_at: Callable[[int], int], stride: int
) -> TrainState:
    """The counters for a checkpoint of ``Engine.save_state``.

    Args:
        where: the checkpoint, for errors.
        loaders: its loaders' places; the first is the training data's.
        facts: what the loop has said: ``step`` is the number of optimizer steps, if it is there. Else each window counts as one.
        batches: micro-batches of an epoch, if that is known.
        window_at: micro-batches of a window, by epoch.
        stride: what one micro-batch adds to the position.

    Raises:
        ValueError: the place in the data, or the number of steps, cannot be known.
    """
    only = "take its weights alone with Resume(path, weights_only=True)"
    if not loaders:
        raise ValueError(f"{where} was saved by a loop that prepared no loader, so that its place in the data is not known: {only}")
    epoch, position = loaders[0]["epoch"], loaders[0]["position"]
    index, step = position // stride, facts.get("step")
    if type(step) is not int:
        if epoch and batches is None:
            raise ValueError(
                f"{where} was saved by a loop over data without a length, so that its number of steps is not known: save it with "
                f'save_state(path, facts={{"step": n}}), or {only}'
            )
        step = sum(-(-(batches or 0) // window_at(each)) for each in range(epoch)) + -(-index // window_at(epoch))
    return TrainState(epoch, step, index, epoch * (batches or 0) + index, position, index)
