"""The optimizers that ``Accelerator.prepare`` returns."""

from __future__ import annotations

from engine.step import own_loop
from engine.step.wrappers import PreparedOptimizer


class AcceleratedOptimizer(PreparedOptimizer):
    """A prepared optimizer. Under Accelerate's rules (``follows``), ``zero_grad`` in a window's last micro-batch clears the window's gradients."""

    follows = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self.follows:
            super().zero_grad(set_to_none)
            return
        state = self._window.state_of(self.optimizer)
        if not own_loop.is_open(self._window, state):
            self.optimizer.zero_grad(set_to_none)
            state.cleared()

    def train(self) -> None:
        if hasattr(self.optimizer, "train"):  # schedule-free optimizers
            self.optimizer.train()

    def eval(self) -> None:
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
