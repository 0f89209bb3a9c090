"""Optimizers of a module with ``automatic_optimization = False``: stepped when the module says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.loop.run import Run
from engine.step.wrappers import PreparedOptimizer


class ManualOptimizer(PreparedOptimizer):
    """A step averages the gradients over the ranks, unscales them, checks them and counts."""

    def __init__(self, prepared: PreparedOptimizer, run: Run) -> None:
        super().__init__(prepared.optimizer, prepared._stepper, prepared._window)
        self._run = run

    def readable(self) -> None:
        """Average the gradients over the ranks and unscale them, as the step will apply them."""
        self._average()
        self._run.engine.unscale_gradients(self)

    def _average(self) -> None:
        gathered = self._window.of(self.optimizer)
        if not gathered.averaged:
            self._run.engine.average_gradients(self)
            gathered.averaged = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the value of ``closure`` when one is given (one process only: it computes gradients inside the step)."""
        run = self._run
        if closure is not None:
            if run.world_size > 1:
                raise RuntimeError(
                    "optimizer.step(closure) on several ranks: call manual_backward first and step() without a closure"
                )
            with run.phases.of("optimizer"):
                value = super().step(closure)
            run.applied(True)
            return value
        if run.hooks.on_before_optimizer_step:
            self.readable()
            for hook in run.hooks.on_before_optimizer_step:
                hook(run, run.module, self)
        else:
            self._average()
        run.phases.named("optimizer", run.engine.step)([self], then=run.applied)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for hook in self._run.hooks.on_before_zero_grad:
            hook(self._run, self._run.module, self)
        super().zero_grad(set_to_none)
