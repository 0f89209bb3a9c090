"""``LightningOptimizer``: what ``self.optimizers()`` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.module import TrainModule
from engine.prepared import raw
from engine.step.verdicts import Guard
from engine.step.wrappers import PreparedOptimizer


class LightningOptimizer(PreparedOptimizer):
    """An optimizer of a run with Lightning's ``optimizer`` and ``toggle_model``; everything else is the run's.

    Args:
        of_run: the run's optimizer: in manual optimization the one that averages and counts, otherwise torch's own.
        module: the module that is trained.
    """

    def __init__(self, of_run: PreparedOptimizer, module: TrainModule) -> None:
        self.optimizer, self._of_run, self._module = raw(of_run), of_run, weakref.ref(module)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(optimizer, torch.optim.SGD), as in Lightning
        return type(self.optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Inside the block, only this optimizer's parameters receive gradients. ``sync_grad`` has no effect: gradients are averaged once, when the
        optimizer steps."""
        with self._module().toggled_optimizer(self):  # type: ignore[union-attr]
            yield

    @property
    def step_was_skipped(self) -> bool:
        return bool(self._of_run.step_was_skipped)

    def guard_by(self, guard: Guard | None) -> None:
        self._of_run.guard_by(guard)

    def readable(self) -> None:
        """Average and unscale the gradients, as the step will apply them."""
        self._of_run.readable()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._of_run.step() if closure is None else self._of_run.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._of_run.zero_grad(set_to_none=set_to_none)
