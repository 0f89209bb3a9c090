"""The accumulation window, which loaders, backward passes and optimizer steps of one engine share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from engine.step.gradient_state import GradientState
from engine.step.gradient_sync import GradientSync
from engine.step.loss_weights import LossWeights
from engine.step.position import Position, Share
from engine.step.reach import Reach


class Window:
    """The accumulation window of one engine: its :attr:`position`, its :attr:`weights`, and the optimizers that step at its end.

    In a usual training all optimizers step together on one loss. A micro-batch then begins with its share (:meth:`begin`), ``weights.weigh`` and
    ``weights.seed`` say from what its backward pass starts, and ``weights.close`` gives the divisor that the gradients still need before the step.

    Args:
        size: micro-batches in a full window.
        gradient_sync: how the ranks combine gradients; by default a single process.
        models: the engine's prepared models.
    """

    __slots__ = ("_joined", "gradient_sync", "models", "position", "weights")

    def __init__(
        self, size: int = 1, gradient_sync: GradientSync | None = None, models: Sequence[nn.Module] = ()
    ) -> None:
        self.gradient_sync, self.models = gradient_sync or GradientSync(), models
        self.position = Position(size)
        """Where the loop is in the window."""
        self.weights = LossWeights(self.position, self.gradient_sync, models)
        """The weights of the window's losses."""
        self._joined = False

    # -- optimizers -------------------------------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer; it steps by itself unless :meth:`join` was called."""
        weights = self.weights
        if self._joined or not weights.states[0].optimizers:
            weights.states[0].optimizers.append(optimizer)
            return
        weights.states.append(GradientState([optimizer]))
        weights.reach = Reach(weights.states, self.gradient_sync, self.models)
        weights.state = weights.reach.latest

    def join(self) -> None:
        """Let all optimizers step together on one loss, from now on."""
        self._joined = True
        self._together([optimizer for state in self.weights.states for optimizer in state.optimizers])

    def leave(self) -> None:
        """Remove all optimizers."""
        self._together([])

    def _together(self, optimizers: list[Optimizer]) -> None:
        """Replace all states by one with these optimizers."""
        weights = self.weights
        weights.state, weights.reach = GradientState(optimizers), None
        weights.states = [weights.state]

    def state_of(self, optimizer: Optimizer) -> GradientState:
        """The state of this optimizer's gradients.

        Raises:
            RuntimeError: the optimizer was not prepared, but several others were.
        """
        reach = self.weights.reach
        return self.weights.state if reach is None else reach.state_of(optimizer)

    # -- micro-batches ----------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> Share:
        """The current micro-batch's share."""
        return self.position.share

    def begin(self, share: Share) -> None:
        """Begin a micro-batch with its share of the window."""
        self.position.share = share

    def discard(self) -> None:
        """End the window without a step; its gradients are discarded."""
        self.position.discard()
        self.weights.fed = False
        for state in self.weights.states:
            state.cleared()
            state.held = False
