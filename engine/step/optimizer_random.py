"""The random numbers that optimizers draw in their steps: equal on all ranks that hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import wraps
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from engine.step.gradient_sync import GradientSync, StepStream
from engine.step.optimizers import is_of_torch
from engine.utils import seed


class OptimizerRandom:
    """Gives optimizers that may draw random numbers in their steps a stream that all ranks with the same values share.

    Each rank has its own random numbers, so that dropout differs, but a step that rounds stochastically, adds noise or probes the Hessian must do the
    same wherever the same values are: otherwise the copies drift apart. Such a step runs on numbers that follow from the seed, the stream's number
    and the number of the step; afterwards the rank's own numbers continue as if the step had drawn none. A closure that the step calls draws from the
    rank's own numbers.

    torch's own optimizers draw nothing and are left alone, and so are all optimizers in a single process, whose own numbers are in its checkpoints.
    Elsewhere ``step`` of the optimizer object is replaced, which costs 0.15 ms a step (measured on a busy machine; most of it is numpy's state).

    Args:
        gradient_sync: says which ranks hold the same values.
        base: the seed.
    """

    def __init__(self, gradient_sync: GradientSync, base: int) -> None:
        self._gradient_sync, self._base = gradient_sync, base
        self._steps: list[SharedStep] = []

    def add(self, optimizer: Optimizer) -> None:
        """Give the optimizer a shared stream where it may need one."""
        if self._gradient_sync.group.world_size > 1 and may_draw(optimizer) and self._step_of(optimizer) is None:
            self._steps.append(SharedStep(optimizer, self))

    def _step_of(self, optimizer: Optimizer) -> SharedStep | None:
        return next((step for step in self._steps if step.optimizer is optimizer), None)

    def stream_of(self, optimizer: Optimizer) -> StepStream | None:
        """The stream of this optimizer's steps on this rank; ``None``: the rank's own numbers serve."""
        return self._gradient_sync.step_stream(optimizer)

    def explain(self, optimizer: Optimizer, error: Exception) -> str:
        """Explain an error of the optimizer's step, as :meth:`GradientSync.explain` does."""
        return self._gradient_sync.explain(error, f"the step of {type(optimizer).__name__}")

    def seed_of(self, stream: int, count: int) -> int:
        """The seed of the step after ``count`` others. Below 2**32, because torch's generator on CPUs takes no more of it."""
        text = f"{self._base} {stream} {count}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")

    def leave(self) -> None:
        """Release all optimizers: their steps are what they were."""
        for step in self._steps:
            step.undo()
        self._steps.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """The seed and the optimizers' numbers of steps, which all ranks share; ``None`` if no step is replaced."""
        return {"seed": self._base, "steps": [step.count for step in self._steps]} if self._steps else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Optimizers beyond the saved ones count from 0."""
        self._base = state["seed"]
        for step, count in zip(self._steps, state["steps"], strict=False):
            step.count = count


def may_draw(optimizer: Optimizer) -> bool:
    """Whether steps of this optimizer may draw random numbers: all but those of torch's own classes without hooks around the step."""
    hooks = (vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    return not is_of_torch(optimizer) or any(hooks)


class SharedStep:
    """The replaced ``step`` of one optimizer."""

    def __init__(self, optimizer: Optimizer, random: OptimizerRandom) -> None:
        self.optimizer, self._random = optimizer, random
        self.count = 0
        """The number of steps so far, also of earlier runs."""
        self._stream: StepStream | None = None
        self._stepped = self._left = False
        self._own: seed.States | None = None  # the rank's own numbers while the step runs on the shared ones
        self._original = optimizer.step
        self._before = vars(optimizer).get("step")  # torch's schedulers replace the method, too

        @wraps(optimizer.step)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._original(*args, **kwargs) if self._left else self._run(args, kwargs)

        # A method, because a scheduler that is created later takes its function.
        self._replacement = MethodType(step, optimizer)
        vars(optimizer)["step"] = self._replacement

    def undo(self) -> None:
        """Let the optimizer step as before."""
        self._left, attributes = True, vars(self.optimizer)
        if attributes.get("step") is self._replacement:
            del attributes["step"]
            if self._before is not None:
                attributes["step"] = self._before

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step, on the shared numbers if other ranks hold the same values."""
        if not self._stepped:
            self._stream = self._random.stream_of(self.optimizer)
        try:
            result = self._original(*args, **kwargs) if self._stream is None else self._draw(self._stream, args, kwargs)
        except Exception as error:
            if text := self._random.explain(self.optimizer, error):
                raise ValueError(text) from error
            raise
        self._stepped = True
        self.count += 1
        return result

    def _draw(self, stream: StepStream, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step on the shared numbers.

        Raises:
            ValueError: the step has drawn some, and ranks with the same values would not draw alike.
        """
        self._own = seed.states()
        try:
            seed.reseed(self._random.seed_of(stream.number, self.count))
            before = seed.states() if stream.obstacle else None
            result = self._original(
                *map(self._on_own_numbers, args),
                **{name: self._on_own_numbers(value) for name, value in kwargs.items()},
            )
            if before is not None and not seed.are_equal(before, seed.states()):
                raise ValueError(
                    f"{type(self.optimizer).__name__} draws random numbers in its step, and {stream.obstacle}: copies of the same values would "
                    "drift apart. Use strategy='ddp', or an optimizer that draws none"
                )
            return result
        finally:
            seed.set_states(self._own)
            self._own = None

    def _on_own_numbers(self, argument: Any) -> Any:
        """The argument; a closure, which evaluates the loss, draws from the rank's own numbers."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            assert self._own is not None
            shared = seed.states()
            seed.set_states(self._own)
            try:
                return argument(*args, **kwargs)
            finally:
                self._own = seed.states()
                seed.set_states(shared)

        return closure
