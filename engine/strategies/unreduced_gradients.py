"""Gradients that no backward pass reduces: averaging them over ranks, and removing those that come from repeated micro-batches only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from engine.distributed import stacks
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.step.position import Position
from engine.utils.tree import leaves

_Form = list[list[int]]


@torch.no_grad()
def average(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Average these parameters' gradients over the ranks, in place, by one collective for each dtype. All ranks pass the same parameters.

    A parameter may have a gradient on some ranks only; if no rank has one it stays ``None``, as in a single process. A rank without some
    gradient waits for its device to learn whether another rank has it; a rank with all gradients does not wait.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        _average_of_dtype(ranks, [p for p in parameters if p.dtype is dtype])


def _average_of_dtype(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Sum one tensor of all gradients and, behind them, of flags whether a rank has each: its layout is the same on every rank."""
    without_grad = [p for p in parameters if p.grad is None]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    counts = grads[0].new_ones(len(grads))
    for index in [index for index, p in enumerate(parameters) if p.grad is None]:
        counts[index] = 0
    flat = torch.cat([*(g.flatten() for g in grads), counts])
    dist.all_reduce(flat)
    *pieces, counts = flat.split([*(g.numel() for g in grads), len(grads)])
    on_any_rank = [x != 0 for x in counts.tolist()] if without_grad else [True] * len(grads)
    for parameter, grad, piece, has_grad in zip(parameters, grads, pieces, on_any_rank, strict=True):
        if has_grad:
            grad.copy_(piece.view_as(grad).div_(ranks.world_size))
            parameter.grad = grad


class GradientAverage:
    """Averages the gradients of a strategy's optimizers in manual optimization, where no backward pass averages them.

    Ranks compare which parameters they train at the first step, and again after a change.
    """

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, ...], _Form] = {}
        """By ids of an optimizer's parameters: the index and shape of each trained one, as the ranks have agreed."""

    def forget(self) -> None:
        self._agreed.clear()

    def __call__(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Average an optimizer's gradients in place, as :func:`average` does.

        Raises:
            ValueError: the ranks train different parameters; raised on all ranks.
        """
        trained = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._agree(ranks, parameters, trained)
        average(ranks, trained)

    def _agree(self, ranks: Group, parameters: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
        """Compare the trained parameters between ranks: a rank that has changed them waits until all other ranks have, too."""
        numbers = {id(p): index for index, p in enumerate(parameters)}
        form = [[numbers[id(p)], *p.shape] for p in trained]
        if self._agreed.get(key := tuple(numbers)) == form:
            return
        with stacks.doing(
            "waiting for the other ranks to step an optimizer whose trained parameters have changed on this one"
        ):
            forms = gather_json(ranks, form)
        for rank, other_form in enumerate(forms):
            if other_form != forms[0]:
                only = [row for row in forms[0] if row not in other_form] or [
                    row for row in other_form if row not in forms[0]
                ]
                index, *shape = only[0]
                raise ValueError(
                    f"manual optimization: ranks 0 and {rank} step an optimizer with different trained parameters: one of them does not train "
                    f"number {index} of its parameters (shape {shape}). Freeze and unfreeze on all ranks, before the same step"
                )
        self._agreed[key] = form


class PassCount:
    """Backward passes since a wrapper's latest forward pass. Its reducer reduces the gradients of the first pass that reaches it, and of no other.

    Args:
        position: where the loop is; it counts all backward passes.
    """

    __slots__ = ("alone", "before", "position", "reached", "synced")

    def __init__(self, position: Position) -> None:
        self.position = position
        self.alone = True
        """No other wrapper is there: each backward pass is taken to reach the outputs. With others, hooks on the outputs find that out."""
        self.before = position.passes
        """The number of backward passes that had begun when the latest forward pass ended."""
        self.synced = False
        """Whether the latest forward pass was to be followed by a reduction."""
        self.reached = False
        """Whether a backward pass has reached the outputs of the latest forward passes."""

    def forward_ended(self, output: Any, synced: bool) -> None:
        """Record a forward pass with gradients, if other wrappers are there."""
        self.before, self.synced, self.reached = self.position.passes, synced, False
        for tensor in leaves(output) if synced else ():
            if tensor.requires_grad:
                tensor.register_hook(self._reach)

    def _reach(self, gradient: Tensor) -> None:
        self.reached = True

    def is_later(self) -> bool:
        """Whether the backward pass that has begun comes after the one that the reducer has taken part in."""
        return self.synced and self.position.passes - self.before > 1 and (self.alone or self.reached)


class LaterPasses:
    """Averages, at a window's end, gradients of backward passes that follow the one in which a wrapper's reducer has averaged: of two losses of one
    forward pass, or of two forward passes that come before both backward passes.

    Averaging is the identity for gradients that are averaged already, so each gradient is averaged as a whole.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        """The parameters with such gradients, by id."""

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Record that a backward pass adds to the gradients of these parameters, which no reducer averages."""
        self.parameters.update((id(p), p) for p in parameters)

    def average(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of those ``parameters`` that were added.

        Raises:
            RuntimeError: other ranks did not run as many backward passes.
        """
        chosen = [p for p in parameters if self.parameters.pop(id(p), None) is not None]
        if not chosen:
            return
        doing = (
            "waiting for the other ranks to average the gradients of a second backward pass between two forward passes, "
            "which this rank has run: all ranks must run equally many"
        )
        with stacks.doing(doing):
            counts = gather_json(ranks, ["second backward pass", len(chosen)])
        if any(count != counts[0] for count in counts):
            raise RuntimeError(
                f"rank {ranks.rank} was {doing}; gradients to average by rank: {', '.join(str(count) for _, count in counts)}"
            )
        average(ranks, chosen)

    @contextmanager
    def watch(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Add the parameters that several backward passes inside the block reach."""
        reached: set[int] = set()

        def record(parameter: Tensor) -> None:
            if id(parameter) in reached:
                self.add([parameter])
            reached.add(id(parameter))

        handles = [p.register_post_accumulate_grad_hook(record) for p in parameters if p.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class ReachedParameters:
    """Records which parameters the samples of a window have reached on this rank.

    A micro-batch that a rank repeats with weight 0, so that all ranks run the same collectives, does not count: gradients that come from
    such micro-batches only become ``None``, not zero.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.forget()

    def forget(self) -> None:
        """Forget the window, before another one begins."""
        self._remove_hooks()
        self._without: set[int] | None = None
        """Parameters (by id) that had no gradient when the window started; ``None``: no window has started."""
        self._reached: set[int] = set()
        """Parameters (by id) without gradient at the window's start that a sample has reached."""
        self._over = False

    def watch(self, parameters: Iterable[Tensor], repeated: bool) -> None:
        """Record what the next backward pass reaches, unless its micro-batch is ``repeated``. Called before a forward pass."""
        if self._over:
            self.forget()
        if self._without is None:
            chosen = [p for p in parameters if p.requires_grad and p.grad is None]
            self._without = {id(p) for p in chosen}
            self._handles = [p.register_post_accumulate_grad_hook(self._record) for p in chosen]
        if repeated:
            self._remove_hooks()

    @torch.no_grad()
    def clear_unreached(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Remove the gradients of parameters that no sample of any rank has reached. A collective."""
        self._remove_hooks()
        self._over, without = True, self._without
        # Models that this rank has not called in the window, as in manual optimization, keep their gradients.
        reached_here = [without is None or id(p) in self._reached or id(p) not in without for p in parameters]
        on_any_rank = torch.tensor(reached_here, dtype=torch.uint8, device=ranks.device)
        dist.all_reduce(on_any_rank, op=dist.ReduceOp.MAX)
        for parameter, reached in zip(parameters, on_any_rank.tolist(), strict=True):
            if not reached:
                parameter.grad = None

    def _record(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
