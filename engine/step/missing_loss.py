"""Micro-batches without a loss, for which ``training_step`` returned ``None``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from engine.distributed.group import Group
from engine.step.gradient_state import SCALAR
from engine.step.loss_agreement import NO_LOSS
from engine.step.window import Window
from engine.utils.log import warn_once


def drop(window: Window, world_size: int, fp16: bool) -> None:
    """Record that the current micro-batch has no loss: its samples do not count (one process), or count with a zero gradient (several)."""
    position, weights = window.position, window.weights
    agreement = weights.agreement
    if weights.state.closed:
        weights.open()
    position.complete = position.share.last
    if fp16 and not agreement.reference_agreed and agreement.lockstep:
        agreement.agree_on_reference(NO_LOSS, position.size)
    if world_size == 1 and position.share.size and position.accumulating:
        for state in weights.states:
            state.dropped += 1.0 / position.share.divisor


def makes_step(window: Window, loss_group: Group) -> bool:
    """Whether the window that ends now makes a step, because some rank had a loss in it. Only ranks without a loss need to call this."""
    weights = window.weights
    for state in weights.states:
        weights.close(state)
    # Whether another rank had a scalar loss is not known; a micro-batch without one counts with a zero gradient.
    return weights.fed or (loss_group.world_size > 1 and any(state.kind == SCALAR for state in weights.states))


def warn_of_zero() -> None:
    """Warn that samples count with a zero gradient. An empty micro-batch, such as ``None`` of a collate function, has none."""
    warn_once(
        "training_step returned None with several ranks: the micro-batch counts with a zero gradient. "
        "To leave samples out exactly, return Loss(sum, count) with the remaining count."
    )


def zero_with_graph(parameters: Iterable[Tensor]) -> Tensor:
    """A zero that depends on each of these parameters, so that its backward pass takes part in the other ranks' gradient reduction."""
    total = sum((p.flatten()[0] * 0.0).real for p in parameters)
    assert isinstance(total, Tensor)
    return total
