"""Forward and backward passes that a pipeline's schedule runs together, in chunks of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.step.gradients import Loss
from engine.step.passes import Passes
from engine.step.scaler import Scaler
from engine.step.window import Window


class Pipelines(Protocol):
    """A strategy that runs forward and backward passes together, as :class:`~engine.strategies.mesh_parallel.MeshParallel` does."""

    loss_group: Group
    has_loss: bool
    """Whether this rank computes the loss; other ranks with the same data receive it."""

    def run_pipeline(
        self, step: Callable[[Any, int], Any], root: Callable[[Any, float], Tensor], batch: Any, last: bool
    ) -> Any:
        """Run forward and backward of one micro-batch in chunks.

        Args:
            step: a function that returns the loss of a chunk, given how many of its samples count (0: run only as far as the call of the model).
            root: a function that returns the scalar to start backward from, given a chunk's loss and its fraction of the micro-batch.
            last: whether the micro-batch is the last of its window.

        Returns:
            The micro-batch's loss without a graph, the same on all ranks that see it.
        """


class PipelinedPasses(Passes):
    """Passes of strategies that run forward and backward together, in chunks of a micro-batch."""

    def __init__(self, window: Window, strategy: Pipelines, scaler: Scaler | None) -> None:
        super().__init__(window, strategy.loss_group, scaler)
        self._strategy = strategy
        window.join()  # there is one model, and one loss

    def forward_backward(
        self, step: Callable[[Any, int], Any], batch: Any, backward: Callable[[Tensor | Loss], None], last: bool
    ) -> Any:
        """Run forward and backward of a micro-batch as the pipeline schedules them; see :meth:`Passes.forward_backward`."""
        weights, strategy, scaler = self._begin(), self._strategy, self._scaler
        if scaler is not None:
            # Creates the scale on ranks without the loss, which need it too.
            scaler.seed(weights.seed(1.0, torch.ones((), device=self._group.device)))

        def root(loss: Tensor | Loss, fraction: float) -> Tensor:
            if isinstance(loss, Loss) and scaler is not None:
                raise ValueError(
                    "Loss(sum, count) with a pipeline under fp16: the sum may overflow; use precision='bf16-mixed', or return a mean"
                )
            # At least two ranks, because this chunk's count is only a part of the divisor of a `Loss`.
            start, divisor = weights.weigh(loss, max(2, self._group.world_size), False)
            if not isinstance(loss, Loss):
                divisor /= fraction
            seed = weights.seed(divisor, start)
            return start * (seed if scaler is None else scaler.seed(seed))

        loss_of_batch = strategy.run_pipeline(step, root, batch, last)
        if not strategy.has_loss:
            self._follow(isinstance(loss_of_batch, Loss))
        if weights.watched is not None:
            weights.attribute()
        return loss_of_batch

    def _follow(self, weighted: bool) -> None:
        """Record a micro-batch whose loss the pipeline's last stage has, as that rank's window does. ``weighted``: it is a ``Loss``."""
        position, weights = self._window.position, self._window.weights
        if weights.state.closed:
            weights.open()
        weights.fed, position.complete = True, position.share.last
        for state in weights.states:
            if weighted:
                state.add(0.0)
            else:
                state.scalars = weights.agreement.scalars = True
