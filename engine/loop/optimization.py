"""``Optimization``: the interface of classes that process the micro-batches and accumulation windows of a training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from engine.loop.logbook import Logbook
from engine.loop.state import TrainState
from engine.step.optimizers import OptimizerSet
from engine.step.position import Share


class Optimization(ABC):
    """Processes the micro-batches and accumulation windows of a training; :func:`engine.loop.setup.choose_optimization` chooses the class."""

    accumulates = True
    """Whether the run decides where a window ends, rather than the module."""
    evaluates_again = False
    """Whether a window's micro-batches may be evaluated more than once, as by LBFGS."""
    calls_closures = False
    """Whether steps go through the module's ``optimizer_step``, with a closure that computes the gradients."""
    stepping = False
    """Whether an optimizer step is in progress, so that the state is not consistent and cannot be saved."""
    windows_without_loss = 0
    """The number of windows of this training in which ``training_step`` returned no loss."""
    samples_left_out = 0
    """The number of samples in the micro-batches for which ``training_step`` returned no loss; 0: these were ``None`` or empty."""
    optimizers: list[Any]
    """The optimizers as hooks and the module get them: torch's, or each in a :class:`engine.step.wrappers.PreparedOptimizer`. A strategy that owns
    the step may have replaced ``zero_grad`` on them, as ``DrivenModel.begin`` in :mod:`engine.strategies.deepspeed` does."""
    backward_pass: Callable[..., Any]
    """Runs the backward pass from a loss: :meth:`engine.Engine.backward`, or the module's overridden ``backward``."""

    def __init__(self, state: TrainState, optimizer_set: OptimizerSet, logbook: Logbook) -> None:
        self._state, self._optimizer_set, self._logbook = state, optimizer_set, logbook

    def applied(self, happened: bool) -> None:
        """After an optimizer step, advance the step counter and the schedulers, if the step ``happened``, that is, was not skipped."""
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
            ValueError: an optimizer holds parameters that the module no longer has.
        """

    @abstractmethod
    def micro(self, batch: Any, index: int, share: Share) -> Any:
        """Process one micro-batch; return what ``training_step`` returned. Usual code: :meth:`engine.loop.steps.AutomaticOptimization.micro`."""

    @abstractmethod
    def step(self) -> None:
        """End the window: step with its gradients, unless it had no loss. Usual code: :meth:`engine.loop.steps.AutomaticOptimization.step`."""

    @abstractmethod
    def cut(self) -> None:
        """Discard the gradients and step values of an incomplete window, when an epoch ends inside it."""

    @abstractmethod
    def before_validation(self) -> None:
        """Clear gradients before a validation during training, if the module overrides the hook for that; otherwise keep them."""
