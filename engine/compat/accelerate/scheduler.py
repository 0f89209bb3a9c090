"""The schedulers that ``Accelerator.prepare`` returns."""

from __future__ import annotations

from typing import Any

from engine.compat.accelerate.state import GradientState
from engine.engine import Engine
from engine.step.wrappers import PreparedScheduler


class AcceleratedScheduler:
    """A prepared scheduler; other attributes are those of the wrapped one. It steps ``times`` times per optimizer step (0: whenever the script
    calls ``step``). ``follows``: whether Accelerate's rules apply."""

    def __init__(self, prepared: PreparedScheduler, engine: Engine, times: int, follows: bool) -> None:
        self._prepared, self._engine, self._times, self._follows = prepared, engine, times, follows
        self.scheduler, self.gradient_state = prepared.scheduler, GradientState()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._times:
            self.scheduler.step(*args, **kwargs)
            return
        if self._follows and not self._engine.sync_gradients and self.gradient_state.plugin.adjust_scheduler:
            self.scheduler._step_count += 1  # Accelerate counts micro-batches too, in schedules with a fixed length
        total = getattr(self.scheduler, "total_steps", None) if self._follows else None
        if total is not None:
            self._engine.settle()
        for _ in range(self._times):
            if total is None or self.scheduler._step_count <= total:
                self._prepared.step(*args, **kwargs)
