"""The random numbers that hooks draw between the backward pass and the step: equal on all ranks that hold the same values."""

from __future__ import annotations

from functools import wraps
from typing import Any

from engine.loop.hooks import Hook
from engine.loop.run import Run
from engine.step.gradient_sync import StepStream
from engine.step.optimizer_random import SharedNumbers, seed_from

EVENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Events at which gradients are those of all ranks, and a hook may change them or the weights."""


def share_random_numbers(run: Run) -> None:
    """Let the module and the callbacks draw alike at :data:`EVENTS` on all ranks with the same values, as optimizers do in their steps
    (:class:`engine.step.optimizer_random.OptimizerRandom`): noise that a hook adds to the gradients would otherwise let the copies drift apart.

    The numbers follow from the seed and the number of the step; the rank's own continue as if the hook had drawn none. That costs 0.15 ms a call, for
    hooks of several ranks only, and not for this library's callbacks, which draw nothing there.
    """
    if run.world_size > 1:
        run.hooks.wrap(HookRandom(run).wrapped)


class HookRandom:
    """The numbers of one run's hooks.

    Args:
        run: the run; it is not kept, because its hooks refer to this object.
    """

    def __init__(self, run: Run) -> None:
        self._engine, self._state = run.engine, run.state
        self._own_callbacks = {
            f"[Callback]{c.state_key}" for c in run.callbacks if type(c).__module__.startswith("callbacks.")
        }
        self._streams: dict[int, StepStream | None] = {}
        self._step, self._calls = -1, 0

    def wrapped(self, name: str, hook: Hook) -> Hook:
        """The ``hook``, on shared numbers if it may change gradients."""
        owner, _, event = name.rpartition(".")
        if event not in EVENTS or owner in self._own_callbacks:
            return hook

        @wraps(hook)
        def on_shared_numbers(*args: Any) -> Any:
            stream = self._stream()
            return hook(*args) if stream is None else self._draw(name, hook, args, stream)

        return on_shared_numbers

    def _stream(self) -> StepStream | None:
        """The stream of the first optimizer."""
        optimizers = self._engine.prepared.optimizers
        if not optimizers:
            return None
        key = id(optimizers[0])
        if key not in self._streams:
            self._streams[key] = self._engine.strategy.step_stream(optimizers[0])
        return self._streams[key]

    def _draw(self, name: str, hook: Hook, args: tuple[Any, ...], stream: StepStream) -> Any:
        """Call the hook on the shared numbers."""
        step = self._state.step
        self._step, self._calls = step, self._calls + 1 if step == self._step else 0
        start = seed_from(self._engine.seed, stream.number, step, self._calls, name)
        advice = "Draw them from a generator that is seeded alike on all ranks, or use strategy='ddp'"
        with SharedNumbers(stream, start, f"{name} draws random numbers", advice):
            return hook(*args)
