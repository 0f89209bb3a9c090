"""The reach of backward passes: whose gradients they change. Needed where several optimizers step by themselves, and after early clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from engine.step.gradient_state import GradientState
from engine.step.gradient_sync import GradientSync
from engine.utils.parameters import parameters_of


class Traces:
    """The traces of some states' gradients, taken now, to find out later which of these gradients a backward pass has reached."""

    __slots__ = ("_before", "_gradient_sync", "_models", "_states")

    def __init__(
        self, states: Sequence[GradientState], gradient_sync: GradientSync, models: Sequence[nn.Module]
    ) -> None:
        self._states, self._gradient_sync, self._models = list(states), gradient_sync, models
        self._before = self._traces()

    def _traces(self) -> list[list[tuple[Any, int]]]:
        return [self._gradient_sync.traces(state.optimizers, self._models) for state in self._states]

    def reached(self) -> list[tuple[GradientState, bool]]:
        """The states whose gradients have changed since, each with whether it had any gradient before."""
        pairs = zip(self._states, self._before, self._traces(), strict=True)
        return [
            (state, any(grad is not None for grad, _ in old))
            for state, old, new in pairs
            if any(a[0] is not b[0] or a[1] != b[1] for a, b in zip(old, new, strict=True))
        ]

    def has_no_gradients(self) -> bool:
        """Whether all gradients are ``None``, as after a model's own ``zero_grad``."""
        versions = [version for of_state in self._before for version in of_state]
        return bool(versions) and all(grad is None for grad, _ in versions)


class Reach:
    """Finds the optimizers that a loss counts for, where several step by themselves: those whose gradients its backward pass has reached.

    Args:
        states: the states of gradients, one for each optimizer.
        gradient_sync: how the ranks combine gradients.
        models: the engine's prepared models.
    """

    __slots__ = ("_before_last", "_gradient_sync", "_models", "_states", "latest", "released")

    def __init__(
        self, states: Sequence[GradientState], gradient_sync: GradientSync, models: Sequence[nn.Module]
    ) -> None:
        self._states, self._gradient_sync, self._models = states, gradient_sync, models
        self.latest = GradientState()
        """The weight of the latest loss, until it is known whom that reaches; always closed, so that each loss begins with another."""
        self.latest.closed = True
        self.released = False
        """Whether the current backward pass ends the windows of the optimizers that it reaches."""
        self._before_last: Traces | None = None

    def traces(self) -> Traces:
        """The traces of all gradients."""
        return Traces(self._states, self._gradient_sync, self._models)

    def state_of(self, optimizer: Optimizer) -> GradientState:
        """The state of this optimizer's gradients.

        Raises:
            RuntimeError: the optimizer was not prepared.
        """
        for state in self._states:
            if any(optimizer is member for member in state.optimizers):
                return state
        raise RuntimeError(
            f"this {type(optimizer).__name__} was not prepared, but others were: call engine.prepare(optimizer) before backward"
        )

    def enter_last(self) -> None:
        """Begin the last micro-batch of a window."""
        self._before_last = self.traces()

    def in_last(self, state: GradientState) -> bool:
        """Whether a backward pass of the window's last micro-batch has reached the gradients."""
        return self._before_last is not None and any(state is reached for reached, _ in self._before_last.reached())

    def hold(self, models: Sequence[nn.Module], is_held: bool) -> None:
        """Set whether the windows of these models' optimizers stay open; an empty sequence stands for all models."""
        parameter_ids = {id(p) for model in models for p in model.parameters()}
        for state in self._states:
            if not models or any(id(p) in parameter_ids for p in parameters_of(state.optimizers)):
                state.held = is_held

    def open(self) -> None:
        """Begin the next window of each state whose window is closed."""
        for state in self._states:
            if state.closed and (
                not state.altered or Traces([state], self._gradient_sync, self._models).has_no_gradients()
            ):
                state.open()
        self.latest.open()
        self.latest.closed = True

    def watched(self, always: bool) -> Traces | None:
        """Return the gradients' traces before a backward pass; ``None`` if it does not matter which optimizers the pass reaches, and ``always`` is
        false."""
        if always or self.released or any(state.altered for state in self._states) or self.has_counts():
            return self.traces()
        return None

    def has_counts(self) -> bool:
        """Whether a ``Loss`` of the current windows counts for some optimizer."""
        return any(state.count is not None for state in self._states)

    def attribute(self, state: GradientState, had_gradients: bool) -> None:
        """Let the latest loss count for a state that its backward pass has reached.

        Raises:
            TypeError: a scalar loss and a ``Loss`` have reached the gradients of one optimizer.
        """
        latest = self.latest
        holds_scalar = state.count is None and not state.used and had_gradients
        if (latest.count is not None and (state.scalars or holds_scalar)) or (
            latest.scalars and state.count is not None
        ):
            raise TypeError(
                "a scalar loss and a Loss(sum, count) have reached the parameters of one optimizer before its step: return one kind"
            )
        state.used = False
        if latest.count is not None:
            state.add(latest.count)
