"""Other backward passes: by a user's function, or by a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.distributed.group import Group
from engine.step.gradients import Loss
from engine.step.precision import Scaler
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.tree import batch_size, map_tensors


class Pipelines(Protocol):
    """A strategy that runs forward and backward passes together, as :class:`~engine.strategies.mesh_parallel.MeshParallel` does."""

    data_group: Group
    has_loss: bool
    """Whether this rank computes the loss, rather than another one with the same data."""

    def run_pipeline(
        self, step: Callable[[Any, int], Any], root: Callable[[Any, float], Tensor], batch: Any, last: bool
    ) -> Any:
        """Forward and backward of one micro-batch in chunks.

        Args:
            step: the loss of a chunk and how many of its samples count (0: only up to the call of the model).
            root: the scalar to start backward from, given a chunk's loss and its fraction of the micro-batch.
            last: the micro-batch closes its window.

        Returns:
            The micro-batch's loss without a graph, the same on all ranks that see it.
        """


class Passes:
    """The weights of a window's micro-batches, for backward passes that other code runs.

    Args:
        group: the ranks that see different data.
        scaler: the loss scaler under fp16, or ``None``.
    """

    def __init__(self, window: Window, group: Group, scaler: Scaler | None) -> None:
        self._window, self._group, self._scaler = window, group, scaler

    def by(self, loss: Tensor | Loss, function: Callable[[Tensor], Any]) -> Tensor:
        """As :meth:`engine.Engine.backward_by`."""
        window = self._begin()
        root, divisor = window.weigh(loss, self._group.world_size, self._scaler is not None)
        value = root.detach().to(accelerator.wide(root.device)) / divisor
        if self._scaler is not None:
            root = root * self._scaler.seed(window.seed(divisor, root))
        elif divisor != 1.0:
            root = root / divisor
        function(root)
        if window.watching:
            window.attribute()
        return value

    def forward_backward(
        self, step: Callable[[Any, int], Any], batch: Any, backward: Callable[[Tensor | Loss], None], last: bool
    ) -> Any:
        """As :meth:`engine.Engine.forward_backward`.

        Args:
            backward: the engine's.
            last: the micro-batch closes its window.
        """
        loss = step(batch, batch_size(batch) or 1)
        backward(loss)
        return map_tensors(Tensor.detach, loss)

    def _begin(self) -> Window:
        if self._window.held and not self._window.accumulating:
            self._window.release()
        return self._window


class PipelinedPasses(Passes):
    """For strategies whose forward and backward passes run together, in parts of the micro-batch."""

    def __init__(self, window: Window, strategy: Pipelines, scaler: Scaler | None) -> None:
        super().__init__(window, strategy.data_group, scaler)
        self._strategy = strategy
        window.join()  # there is one model, and one loss

    def forward_backward(
        self, step: Callable[[Any, int], Any], batch: Any, backward: Callable[[Tensor | Loss], None], last: bool
    ) -> Any:
        """As :meth:`Passes.forward_backward`."""
        window, strategy, scaler = self._begin(), self._strategy, self._scaler
        if scaler is not None:
            scaler.seed(
                window.seed(1.0, torch.ones((), device=self._group.device))
            )  # ranks without the loss need the scale too

        def root(loss: Tensor | Loss, fraction: float) -> Tensor:
            if isinstance(loss, Loss) and scaler is not None:
                raise ValueError(
                    "Loss(sum, count) with a pipeline under fp16: the sum may overflow; use precision='bf16-mixed', or return a mean"
                )
            # As with several ranks: the loss is known here, but not the whole divisor.
            start, divisor = window.weigh(loss, max(2, self._group.world_size), False)
            if not isinstance(loss, Loss):
                divisor /= fraction
            seed = window.seed(divisor, start)
            return start * (seed if scaler is None else scaler.seed(seed))

        found = strategy.run_pipeline(step, root, batch, last)
        if not strategy.has_loss:
            window.follow(isinstance(found, Loss))
        if window.watching:
            window.attribute()
        return found
