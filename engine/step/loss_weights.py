"""The weights of a window's losses: of each one before its backward pass, and the divisor of their gradients before the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.step.gradient_state import SCALAR, WEIGHTED, GradientState
from engine.step.gradient_sync import GradientSync
from engine.step.gradients import Loss, nonzero, scalar
from engine.step.loss_agreement import SCALAR_LOSS, LossAgreement
from engine.step.position import Position, Share
from engine.step.reach import Reach, Traces
from engine.utils.log import warn_once
from engine.utils.parameters import parameters_of
from engine.utils.sample_count import guess_text
from engine.utils.tree import full_tensor


class LossWeights:
    """The weights of a window's losses.

    A scalar loss is a mean over its micro-batch's samples: its weight follows from the micro-batch's share and goes into the gradient with which
    backward starts. The weight of a ``Loss(sum, count)`` is its count, which :meth:`close` adds up over the window and the ranks.

    Args:
        position: where the loop is in its window.
        gradient_sync: how the ranks combine gradients.
        models: the engine's prepared models.
    """

    __slots__ = (
        "_gradient_sync",
        "_models",
        "_position",
        "_seeds",
        "_unit",
        "_unit_count",
        "agreement",
        "fed",
        "items",
        "reach",
        "state",
        "states",
        "watched",
    )  # fmt: skip

    def __init__(self, position: Position, gradient_sync: GradientSync, models: Sequence[nn.Module]) -> None:
        self._position, self._gradient_sync, self._models = position, gradient_sync, models
        self.agreement = LossAgreement(gradient_sync)
        """The ranks' agreement about their losses."""
        self.state = GradientState()
        """The state of the gradients that the next loss counts for: of all optimizers, or :attr:`Reach.latest`."""
        self.states = [self.state]
        """The states of gradients: one for all optimizers that step together, or one for each that steps by itself."""
        self.reach: Reach | None = None
        """Finds the optimizers that a loss counts for, where several step by themselves; ``None``: all step together."""
        self.watched: Traces | None = None
        """The traces of gradients before the current backward pass, if :meth:`attribute` is to be called after it."""
        self.fed = False
        """Whether this rank had a loss in this window."""
        self.items: Tensor | float | None = None
        """Total ``count`` of the latest finished window over all ranks, until it is taken; with several states that of the first."""
        # The divisor of a window whose only loss was divided by it before backward, and the count of that loss.
        self._unit: Tensor | float | None = None
        self._unit_count: Tensor | float | None = None
        self._seeds: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}

    # -- before a backward pass -------------------------------------------------------------------------------------------------

    def weigh(self, loss: Tensor | Loss, world_size: int, fp16: bool) -> tuple[Tensor, float]:
        """Return the scalar that backward starts from, and the divisor of its gradient in the current micro-batch. A divisor of infinity: the
        gradient of this loss counts as zero."""
        state, position, agreement = self.state, self._position, self.agreement
        share = position.share
        if state.closed:
            self.open()
            if state.closed:
                self._watch(isinstance(loss, Loss))
        position.complete = share.last
        if type(loss) is not Tensor and isinstance(loss, Loss):
            return self._weigh_sum(loss, share, world_size, fp16)
        root = loss if type(loss) is Tensor and not loss.ndim and loss.requires_grad else scalar(loss)
        if state.count is not None:
            raise TypeError(
                "this micro-batch has a scalar loss, an earlier one of the same window has Loss(sum, count): return one kind"
            )
        state.scalars = agreement.scalars = self.fed = True
        if fp16 and not agreement.reference_agreed and agreement.lockstep:
            agreement.agree_on_reference(SCALAR_LOSS, position.size)
        if share.size == 0:
            return root, math.inf
        if share.guess and position.size * self._gradient_sync.loss_group.world_size > 1:
            warn_once(guess_text(share.guess))
        return root, share.divisor if position.accumulating else share.alone

    def _weigh_sum(self, loss: Loss, share: Share, world_size: int, fp16: bool) -> tuple[Tensor, float]:
        state, agreement, accumulating = self.state, self.agreement, self._position.accumulating
        if state.scalars:
            raise TypeError(
                "this micro-batch has Loss(sum, count), an earlier one of the same window has a scalar loss: return one kind"
            )
        root, count = scalar(loss.sum), loss.count
        if isinstance(count, Tensor):
            count = full_tensor(count.detach())
        if state.count is not None and not accumulating and self._has_no_gradients():
            state.open()
        if state.count is None and (self.reach is None or not self.reach.has_counts()):
            # The whole window in one micro-batch: divide the loss, not the gradients, as a bare loop does.
            alone = world_size == 1 and (share.last or not accumulating)
            self._unit, self._unit_count = (nonzero(count), count) if alone else (None, None)
        if share.size == 0:
            count = count * 0.0
        else:
            self.fed = True
        state.add(count)
        if self._unit is not None:
            return root / self._unit, 1.0
        if fp16 and agreement.reference is None:
            agreement.agree_on_reference(float(count), self._position.size)
        return root, (agreement.reference or 1.0) if share.size else math.inf

    def seed(self, divisor: float, like: Tensor) -> Tensor:
        """The gradient with which backward starts from ``like``: 1 / ``divisor``. Shape ``()``, fp32 or fp64; made once for each value.

        This weighs the loss at no cost: multiplying the loss itself would add a node to the graph (10 us a micro-batch).
        """
        key = (divisor, like.device, like.dtype)
        if key in self._seeds:
            return self._seeds[key]
        if len(self._seeds) > 256:
            self._seeds.clear()
        # Divided in the format in which autograd divides for (loss / divisor).backward(): the same last bit.
        numerator = torch.ones((), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
        seed = self._seeds[key] = (numerator / divisor).to(like.device, non_blocking=True)
        return seed

    def open(self) -> None:
        """Begin the next window."""
        state, self.fed, self.watched = self.state, False, None
        if self.reach is not None:
            self.reach.open()
        elif state.altered and not self._has_no_gradients():
            state.count, state.scalars = None, False  # it stays closed: the next backward pass may or may not reach it
        elif state.altered or state.ready or state.dropped or state.count is not None:
            state.open()
        else:  # the usual window
            state.closed = state.scalars = state.averaged = False

    def _watch(self, weighted: bool) -> None:
        """Prepare to find out whom the next backward pass reaches, if that matters. ``weighted``: it starts from a ``Loss``."""
        if self.reach is not None:
            self.watched = self.reach.watched(weighted)
        else:  # gradients that were altered before their step
            self.watched = Traces(self.states, self._gradient_sync, self._models)

    def _has_no_gradients(self) -> bool:
        """Whether something other than the optimizers' ``zero_grad`` set all gradients to ``None``."""
        return Traces(self.states, self._gradient_sync, self._models).has_no_gradients()

    def attribute(self) -> None:
        """Record that the gradients of each optimizer that the finished backward pass has reached contain its loss; their divisor depends on it.

        Raises:
            TypeError: a scalar loss and a ``Loss`` have reached the gradients of one optimizer.
            RuntimeError: the pass added to gradients that were divided, unscaled or clipped for a step that has not happened.
        """
        traces, self.watched = self.watched, None
        if self.reach is not None:
            self.reach.released = False
        for state, had_gradients in () if traces is None else traces.reached():
            state.check_unaltered()
            if not self._position.accumulating:
                state.held = False
            if self.reach is not None:
                self.reach.attribute(state, had_gradients)

    # -- the end of a window ----------------------------------------------------------------------------------------------------

    def close(self, state: GradientState) -> Tensor | float | None:
        """Close the window of some gradients. Return the divisor that they still need, or ``None``: the same value until the next backward pass."""
        sync, agreement, items = self._gradient_sync, self.agreement, state.count
        if self._position.share.repeats and not state.closed:
            sync.drop_repeated(parameters_of(state.optimizers))
        if sync.unreduced and not state.closed:
            sync.reduce_rest(parameters_of(state.optimizers))
        if state.count is None and not state.dropped and (sync.group.world_size == 1 or state.kind == SCALAR):
            state.closed = True  # all weights were known before the backward passes
            return None
        if state.closed:
            return state.total
        if sync.group.world_size > 1 and not state.kind:
            agreement.agree_on_kind(state)
        weighted = state.count is not None or (state.kind == WEIGHTED and not state.scalars)
        if sync.group.world_size == 1 or not weighted or self._unit is not None:
            state.total = self._divisor_of_one(state)
            state.kind = SCALAR if state.kind and not weighted else state.kind
        else:
            state.kind = WEIGHTED
            items, self.fed = agreement.total(state.count, self.fed)
            state.total = nonzero(items / (sync.loss_group.world_size * (agreement.reference or 1.0)))
        if state is self.states[0]:
            self.items = items
        state.closed = True
        return state.total

    def _divisor_of_one(self, state: GradientState) -> Tensor | float | None:
        """The divisor that the gradients still need if no sum over ranks is due: in one process, and for scalar losses."""
        if state.count is not None:
            if self._unit is not None:
                return None if state.count is self._unit_count else nonzero(state.count) / self._unit
            return nonzero(state.count / (self.agreement.reference or 1.0))
        return 1.0 - state.dropped if state.scalars and 0.0 < state.dropped < 1.0 else None
