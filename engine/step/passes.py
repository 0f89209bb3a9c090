"""Backward passes that a user's function runs, and a micro-batch's forward and backward pass in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.distributed.group import Group
from engine.step import own_loop
from engine.step.gradients import Loss
from engine.step.loss_weights import LossWeights
from engine.step.scaler import Scaler
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.sample_count import counted
from engine.utils.tree import map_tensors


class Passes:
    """Gives micro-batches their window's weights in backward passes that other code runs. Under a pipeline the strategy gives
    :class:`engine.strategies.pipelined_passes.PipelinedPasses` in its place.

    Args:
        group: the ranks whose losses are averaged.
        scaler: the loss scaler under fp16, or ``None``.
    """

    def __init__(self, window: Window, group: Group, scaler: Scaler | None) -> None:
        self._window, self._group, self._scaler = window, group, scaler

    def by(self, loss: Tensor | Loss, function: Callable[[Tensor], Any]) -> Tensor:
        """Run a user's backward pass with this micro-batch's weight; see :meth:`engine.Engine.backward_by`."""
        weights = self._begin()
        root, divisor = weights.weigh(loss, self._group.world_size, self._scaler is not None)
        value = root.detach().to(accelerator.wide(root.device)) / divisor
        if self._scaler is not None:
            root = root * self._scaler.seed(weights.seed(divisor, root))
        elif divisor != 1.0:
            root = root / divisor
        position, sync = self._window.position, self._window.gradient_sync
        position.passes += 1
        if position.passes > position.reduced_passes:
            sync.follow_pass()
        with sync.watched_passes():
            function(root)
        if weights.watched is not None:
            weights.attribute()
        return value

    def forward_backward(
        self, step: Callable[[Any, int], Any], batch: Any, backward: Callable[[Tensor | Loss], None], last: bool
    ) -> Any:
        """Run the step function of a micro-batch and its backward pass; see :meth:`engine.Engine.forward_backward`.

        Args:
            backward: ``Engine.backward``.
            last: whether the micro-batch closes its window.
        """
        samples = self._window.position.share.size
        loss = step(batch, samples if samples >= 0 else counted(batch)[0])
        backward(loss)
        return map_tensors(Tensor.detach, loss)

    def _begin(self) -> LossWeights:
        """The window's weights, ready for a backward pass outside of ``accumulate``, too."""
        position = self._window.position
        if position.held and not position.accumulating:
            own_loop.release(self._window)
        return self._window.weights
