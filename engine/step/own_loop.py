"""Accumulation in loops of one's own: micro-batches that ``Engine.accumulate`` begins and ends, and optimizers that ask whether to step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from engine.step.gradient_state import GradientState
from engine.step.position import NOT_FROM_LOADER, Share
from engine.step.window import Window

_COUNTED = -1.0
"""``Share.alone`` of the shares that :func:`enter` makes by counting micro-batches, without a prepared loader."""


def enter(window: Window) -> None:
    """Begin a micro-batch; without a prepared loader, every :attr:`Position.size`-th micro-batch ends a window."""
    position, reach = window.position, window.weights.reach
    if position.share is NOT_FROM_LOADER or position.share.alone == _COUNTED:
        position.counted += 1
        is_last = position.counted % position.size == 0
        position.share = Share(size=1, divisor=float(position.size), alone=_COUNTED, last=is_last)
    position.accumulating, position.complete = True, False
    if reach is not None and position.share.last:
        reach.enter_last()


def leave(window: Window, models: Sequence[nn.Module]) -> None:
    """End a micro-batch of ``models`` that :func:`enter` began; an empty sequence stands for all models."""
    position, reach = window.position, window.weights.reach
    position.accumulating = False
    position.held = not position.share.last
    if position.share.alone == _COUNTED:
        position.share = NOT_FROM_LOADER
    if reach is None:
        window.weights.state.held = position.held
    else:
        reach.hold(models, position.held)


def release(window: Window) -> None:
    """Begin a backward pass outside of ``accumulate``: the window of each optimizer that it reaches is complete."""
    window.position.held, reach = False, window.weights.reach
    if reach is None:
        window.weights.state.held = False
    else:
        reach.released = True


def is_open(window: Window, state: GradientState) -> bool:
    """Whether more micro-batches come before the step that uses these gradients."""
    position = window.position
    return not position.share.last if position.accumulating else state.held


def may_clear(window: Window, state: GradientState) -> bool:
    """Whether the gradients may be cleared without a step: the window is complete, or the loop does not accumulate."""
    position, reach = window.position, window.weights.reach
    if not position.accumulating:
        return not state.held
    if not position.share.last or not position.complete:
        return False
    return reach is None or reach.in_last(state)
