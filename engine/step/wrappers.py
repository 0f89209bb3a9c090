"""Wrappers that ``Engine.prepare`` returns: optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from engine.step import own_loop
from engine.step.gradient_state import GradientState
from engine.step.optimizer_step import Stepper
from engine.step.verdicts import Guard
from engine.step.window import Window


class PreparedOptimizer(Optimizer):
    """An optimizer that steps once per window with exact gradients, and skips non-finite steps. All else is left to the wrapped optimizer.

    Until the last micro-batch of a window, inside ``engine.accumulate`` and after its block, ``step`` does nothing, and ``zero_grad``
    clears only gradients that a step has used: it may be called at the start or at the end of the loop's body.
    """

    def __init__(self, optimizer: Optimizer, stepper: Stepper, window: Window) -> None:
        # Not Optimizer.__init__: parameters, state and hooks stay in the one optimizer that has them.
        self.optimizer, self._stepper, self._window = optimizer, stepper, window

    def __getattr__(self, name: str) -> Any:
        # Optimizers have methods that no wrapper can list (schedule-free ones have train() and eval()).
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # Handles of this job's processes cannot be pickled: a copy is the plain optimizer.
        return _itself, (self.optimizer,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped because a gradient was not finite. Waits for the device."""
        self._stepper.await_verdicts()
        return self._stepper.skipped

    def guard_by(self, guard: Guard | None) -> None:
        """Let ``guard`` decide, on the device, whether each step is applied; it decides for all optimizers that were prepared together.

        Raises:
            ValueError: the strategy steps by itself (DeepSpeed).
        """
        self._stepper.guard_by(guard)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once with the window's gradients, or with those that ``closure`` computes, as for LBFGS; return the value of ``closure``."""
        weights = self._window.weights
        state = weights.state if weights.reach is None else weights.reach.state_of(self.optimizer)
        if own_loop.is_open(self._window, state):
            return None
        state.used = True
        if closure is None:
            return self._stepper.step([self.optimizer])
        self._stepper.check_closure()

        def evaluate() -> Any:
            value = closure()
            self._stepper.finish_inside([self.optimizer])
            state.used = True  # LBFGS calls the closure, and so zero_grad, several times in one step
            return value

        if self._stepper.verdicts is not None:
            self._stepper.verdicts.skipped = False
        return self.optimizer.step(evaluate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        weights = self._window.weights
        state = weights.state if weights.reach is None else weights.reach.state_of(self.optimizer)
        if state.used or state.ready or own_loop.may_clear(self._window, state):
            self.optimizer.zero_grad(set_to_none=set_to_none)
            state.cleared()


class PreparedScheduler:
    """A learning rate scheduler that steps once for each applied optimizer step, whatever the number of processes."""

    def __init__(self, scheduler: Any, stepper: Stepper, window: Window) -> None:
        self.scheduler, self._stepper, self._window = scheduler, stepper, window

    def __getattr__(self, name: str) -> Any:
        # Schedulers have no common interface beyond step and state_dict.
        if name == "scheduler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.scheduler,)

    def _state(self) -> GradientState:
        """The gradient state of the scheduler's optimizer; the first one for third-party schedulers that do not name their optimizer."""
        optimizer = getattr(self.scheduler, "optimizer", None)
        if isinstance(optimizer, PreparedOptimizer):
            optimizer = optimizer.optimizer
        is_prepared = any(optimizer is stepped for stepped in self._stepper.optimizers)
        return self._window.state_of(optimizer) if is_prepared else self._window.weights.states[0]  # type: ignore[arg-type]

    def step(self, *args: Any, **kwargs: Any) -> None:
        if own_loop.is_open(self._window, self._state()):
            return

        def advance(applied: bool) -> None:
            if applied:
                self.scheduler.step(*args, **kwargs)

        self._stepper.after(advance)


def _itself(wrapped: Any) -> Any:
    return wrapped
