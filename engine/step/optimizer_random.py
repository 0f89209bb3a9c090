"""The random numbers that optimizers draw in their steps: equal on all ranks that hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from engine.distributed.collectives import gather_json
from engine.step.gradient_sync import GradientSync, StepStream
from engine.step.optimizers import ReplacedStep, is_of_torch
from engine.step.own_generators import own_generators, set_state, state_of
from engine.utils import seed


class OptimizerRandom:
    """Gives optimizers that may draw random numbers in their steps a stream that all ranks with the same values share.

    Each rank has its own random numbers, so that dropout differs, but a step that rounds stochastically, adds noise or probes the Hessian must do the
    same wherever the same values are: otherwise the copies drift apart. Such a step runs on numbers that follow from the seed, the stream's number
    and the number of the step; afterwards the rank's own numbers continue as if the step had drawn none. A closure that the step calls draws from the
    rank's own numbers.

    A generator that the optimizer has itself (``self.generator``) stays as it is: before the first step its state must be the same on all ranks with
    the same values, and each rank saves it.

    torch's own optimizers draw nothing and are left alone, and so are all optimizers in a single process, whose own numbers are in its checkpoints.
    Elsewhere ``step`` of the optimizer object is replaced, which costs 0.15 ms a step (measured on a busy machine; most of it is numpy's state).

    Args:
        gradient_sync: says which ranks hold the same values.
        base: the seed.
    """

    def __init__(self, gradient_sync: GradientSync, base: int) -> None:
        self._gradient_sync, self._base = gradient_sync, base
        self._steps: list[SharedStep] = []
        self._optimizers: list[Optimizer] = []

    def add(self, optimizer: Optimizer) -> None:
        """Give the optimizer a shared stream where it may need one."""
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)
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
        """The seed of the step after ``count`` others."""
        return seed_from(self._base, stream, count)

    def leave(self) -> None:
        """Release all optimizers: their steps are what they were."""
        for step in self._steps:
            step.undo()
        self._steps.clear()
        self._optimizers.clear()

    def generator_states(self) -> dict[str, Tensor | str]:
        """The states of the optimizers' own generators on this rank, by name."""
        return {name: state_of(generator) for name, generator in self._own_generators().items()}

    def restore_generators(self, states: Mapping[str, Tensor | str]) -> None:
        """Restore what :meth:`generator_states` returned. Generators without a saved state are not changed."""
        for name, generator in self._own_generators().items():
            if name in states:
                set_state(generator, states[name])

    def _own_generators(self) -> dict[str, Any]:
        return {
            f"{index}.{name}": generator
            for index, optimizer in enumerate(self._optimizers)
            for name, generator in own_generators(optimizer).items()
        }

    def check_generators(self, optimizer: Optimizer, stream: StepStream) -> None:
        """Compare the optimizer's own generators over the ranks that hold the same values. All ranks call this together.

        Raises:
            ValueError: a state differs; raised on all ranks.
        """
        states = {name: state_of(generator) for name, generator in own_generators(optimizer).items()}
        texts = {name: str(state.tolist()) if isinstance(state, Tensor) else state for name, state in states.items()}
        sums = {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        rows = gather_json(self._gradient_sync.group, [stream.number, sums])
        firsts: dict[int, int] = {}
        for rank, (number, of_rank) in enumerate(rows):
            first = firsts.setdefault(number, rank)
            differing = [name for name in of_rank if of_rank[name] != rows[first][1].get(name)]
            if differing:
                raise ValueError(
                    f"{type(optimizer).__name__}.{differing[0]} is a random generator whose state on rank {rank} is not that on rank {first}, and "
                    "both hold the same parameters: their steps would draw different numbers, and the copies would drift apart. Seed it alike on all "
                    "ranks, for example with manual_seed(0), and not with the process's id, its rank or the time; or draw from torch's own "
                    "generator, which draws alike here"
                )

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


def seed_from(*parts: int | str) -> int:
    """A seed that follows from ``parts``. Below 2**32, because torch's generator on CPUs takes no more of it."""
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest(), "little")


class SharedNumbers:
    """A block that runs on the random numbers that ranks with the same values share; afterwards the rank's own numbers continue.

    Args:
        stream: says which ranks share them.
        start: the seed.
        what: the sentence of an error that says who draws.
        advice: the end of an error.

    Raises:
        ValueError: at the block's end: it has drawn some, and ranks with the same values would not draw alike.
    """

    def __init__(self, stream: StepStream, start: int, what: str, advice: str) -> None:
        self._stream, self._start, self._what, self._advice = stream, start, what, advice
        self._own: seed.States | None = None
        """The rank's own numbers while the block runs."""

    def __enter__(self) -> Self:
        self._own = seed.states()
        seed.reseed(self._start)
        self._before = seed.states() if self._stream.obstacle else None
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        assert self._own is not None
        drew = kind is None and self._before is not None and not seed.are_equal(self._before, seed.states())
        seed.set_states(self._own)
        self._own = None
        if drew:
            raise ValueError(
                f"{self._what}, and {self._stream.obstacle}: copies of the same values would drift apart. {self._advice}"
            )

    def on_own(self, argument: Any) -> Any:
        """The argument of a step; a closure, which evaluates the loss, draws from the rank's own numbers."""
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


class SharedStep(ReplacedStep):
    """The step of one optimizer, on numbers that ranks with the same values share."""

    def __init__(self, optimizer: Optimizer, random: OptimizerRandom) -> None:
        super().__init__(optimizer)
        self._random = random
        self.count = 0
        """The number of steps so far, also of earlier runs."""
        self._stream: StepStream | None = None
        self._stepped = False

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step, on the shared numbers if other ranks hold the same values."""
        is_first, had_generators = not self._stepped, False
        if is_first:
            self._stream = self._random.stream_of(self.optimizer)
            had_generators = self._check_generators()
        try:
            result = self._original(*args, **kwargs) if self._stream is None else self._draw(self._stream, args, kwargs)
        except Exception as error:
            if text := self._random.explain(self.optimizer, error):
                raise ValueError(text) from error
            raise
        self._stepped = True
        if is_first and not had_generators:
            self._check_generators()  # the step may have made one
        self.count += 1
        return result

    def _check_generators(self) -> bool:
        """Compare the optimizer's own generators over the ranks. Return whether it has any."""
        if self._stream is None or not own_generators(self.optimizer):
            return False
        self._random.check_generators(self.optimizer, self._stream)
        return True

    def _draw(self, stream: StepStream, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step on the shared numbers."""
        start = self._random.seed_of(stream.number, self.count)
        what = f"{type(self.optimizer).__name__} draws random numbers in its step"
        with SharedNumbers(stream, start, what, "Use strategy='ddp', or an optimizer that draws none") as numbers:
            return self._original(
                *map(numbers.on_own, args), **{name: numbers.on_own(value) for name, value in kwargs.items()}
            )
