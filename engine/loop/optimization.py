"""The interface of what processes a training's micro-batches and windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from engine.loop.logbook import Logbook
from engine.loop.state import TrainState
from engine.step.optimizers import OptimizerSet
from engine.step.window import Share


class Optimization(ABC):
    """Processes the micro-batches and windows of a training. Chosen once, by :func:`engine.loop.setup.optimization`."""

    accumulates = True
    """True if the run decides where a window ends; otherwise the module steps when it wants."""
    evaluates_again = False
    """True if a window's micro-batches may be computed again, as LBFGS does."""
    calls_closures = False
    """True if steps go through the module's ``optimizer_step``, with a closure that computes the gradients."""
    stepping = False
    """True inside an optimizer step: the state is not consistent and cannot be saved."""
    optimizers: list[Any]
    """The optimizers as hooks and the module get them: torch's own, or :class:`engine.step.wrappers.PreparedOptimizer` around them."""
    backward_pass: Callable[..., Any]
    """The backward pass from a loss: :meth:`engine.Engine.backward`, or the module's overridden ``backward``."""

    def __init__(self, state: TrainState, optimizer_set: OptimizerSet, logbook: Logbook) -> None:
        self._state, self._optimizer_set, self._logbook = state, optimizer_set, logbook

    def applied(self, happened: bool) -> None:
        """An optimizer step was taken: ``happened`` (or skipped: counters and schedulers then stay where they are)."""
        if happened:
            state, logbook = self._state, self._logbook
            state.step += 1
            for schedule in self._optimizer_set.step_schedules:
                if state.step % schedule.frequency == 0:
                    metrics = logbook.with_this_step() if schedule.reduce_on_plateau else logbook.metrics
                    schedule.advance(metrics, state.step)

    @abstractmethod
    def begin(self) -> None:
        """Prepare for an epoch.

        Raises:
            ValueError: an optimizer has parameters that the module no longer has.
        """

    @abstractmethod
    def micro(self, batch: Any, index: int, share: Share) -> Any:
        """Process one micro-batch; return what ``training_step`` returned. Usually :meth:`engine.loop.steps.AutomaticOptimization.micro`."""

    @abstractmethod
    def step(self) -> None:
        """End the window: finish its gradients and step, unless it had no loss. Usually :meth:`engine.loop.steps.AutomaticOptimization.step`."""

    @abstractmethod
    def cut(self) -> None:
        """End an epoch inside a window: discard the window's gradients and step values."""

    @abstractmethod
    def before_validation(self) -> None:
        """Clear gradients before a validation during training, if the module wants that; otherwise they are kept."""
