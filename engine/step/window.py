"""The accumulation window: the weights of its micro-batches' losses, and the state of each optimizer's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.distributed.group import Group
from engine.step.gradient_sync import GradientSync
from engine.step.gradients import Loss, nonzero, scalar
from engine.utils import accelerator
from engine.utils.parameters import parameters_of
from engine.utils.tree import full_tensor


class Share(NamedTuple):
    """The weight of one micro-batch."""

    size: int
    """Samples in the micro-batch; 0 for a repeated one that only keeps the collectives matched; -1: not known, to be read from the batch."""
    divisor: float
    """Divisor for the micro-batch's mean loss; with it, the window's sum, averaged over ranks, is the mean over all samples."""
    alone: float
    """Divisor for the mean loss if the micro-batch is a window of its own, in loops without accumulation."""
    last: bool
    """Whether the micro-batch is the last of its window."""
    repeats: bool = False
    """Whether some rank repeats a micro-batch in this window."""
    samples: int = -1
    """Samples in the window, over all ranks; -1: not known, the samples of this batch."""


NOT_FROM_LOADER = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""The share of a batch that does not come from a prepared loader."""
_COUNTED = -1.0
"""``Share.alone`` of the shares that :meth:`Window.enter` makes by counting micro-batches, without a prepared loader."""


@lru_cache(maxsize=1024)
def shares(sizes: tuple[tuple[int, ...], ...], rank: int) -> tuple[Share, ...]:
    """The shares of one window on ``rank``. ``sizes[j][r]`` is the number of samples in micro-batch ``j`` of rank ``r``."""
    world_size = len(sizes[0])
    total, repeats = sum(map(sum, sizes)), any(0 in micro for micro in sizes)
    return tuple(
        Share(
            size=micro[rank],
            divisor=total / (micro[rank] * world_size) if micro[rank] else 1.0,
            alone=sum(micro) / (micro[rank] * world_size) if micro[rank] else 1.0,
            last=j == len(sizes) - 1,
            repeats=repeats,
            samples=total,
        )
        for j, micro in enumerate(sizes)
    )


SCALAR, WEIGHTED = 1, 2
"""Kinds of losses: a scalar, which is a mean, and ``Loss(sum, count)``."""
_SCALAR_LOSS, _NO_LOSS = -1.0, -2.0
"""Instead of a count, where the ranks agree on the largest count of a ``Loss``."""


class GradientState:
    """The state of one optimizer's gradients since its last step.

    Optimizers that step together on one loss share one such object.
    """

    __slots__ = (
        "altered",
        "averaged",
        "closed",
        "count",
        "dropped",
        "held",
        "kind",
        "optimizers",
        "ready",
        "scalars",
        "total",
        "used",
    )

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self.optimizers = list(optimizers)
        self.kind = 0
        """The kind of losses that the ranks agreed on, ``SCALAR`` or ``WEIGHTED``; 0: not known yet."""
        self.held = False
        """Whether the latest ``accumulate`` block left its window open: no step and no clearing until the next block."""
        self.used = False
        """Whether a step has used the gradients."""
        self.open()

    def open(self) -> None:
        """Reset this state before the gradients of another window are accumulated."""
        self.count: Tensor | float | None = None
        """Sum of the counts of this rank's ``Loss`` objects so far; ``None``: there was none."""
        self.scalars = False
        """Whether any loss was a scalar."""
        self.dropped = 0.0
        """The fraction of the window's samples whose micro-batches had no loss; known in a single process only."""
        self.closed = False
        """Whether :attr:`total` is known: the next backward pass then opens another window."""
        self.total: Tensor | float | None = None
        """Divisor that the gradients still need; ``None``: they need no division."""
        self.ready: dict[int, Tensor | None] = {}
        """Optimizers (by id) whose gradients are divided and unscaled, with a flag (1.0: not finite) where one was needed."""
        self.altered = False
        """Whether gradients were divided, unscaled or clipped before their step: another backward pass would now mix two scales."""
        self.averaged = False
        """Whether the ranks average the gradients explicitly (manual optimization)."""

    def cleared(self) -> None:
        """Record that the gradients were set to zero."""
        self.open()
        self.used = False

    def add(self, count: Tensor | float) -> None:
        """Add the ``count`` of another ``Loss``."""
        self.count = count if self.count is None else _wide(self.count) + count


def _wide(count: Tensor | float) -> Tensor | float:
    """``count`` in a dtype for sums: in half precision and small integers sums would be rounded, or overflow."""
    if isinstance(count, Tensor) and count.dtype not in (torch.float32, torch.float64, torch.int64):
        return count.to(accelerator.wide(count.device))
    return count


def packed(count: Tensor | float | None, fed: bool, device: torch.device) -> Tensor:
    """This rank's count and whether it had a loss (``fed``), always on ``device``, so that all ranks use the same backend. Shape [2], fp64."""
    if isinstance(count, Tensor):
        count = count.to(device, accelerator.wide(device), non_blocking=True).reshape(())
        return torch.stack([count, torch.full_like(count, float(fed))])
    return torch.tensor([count or 0.0, float(fed)], dtype=accelerator.wide(device)).to(device, non_blocking=True)


Sum = Callable[[Tensor], Any]
"""A function that returns the sum of a tensor over the ranks whose losses are averaged."""


class Window:
    """The accumulation window, which loaders, backward passes and optimizer steps of one engine share.

    Args:
        size: micro-batches in a full window.
        gradient_sync: how the ranks combine gradients; by default a single process.
        models: the engine's prepared models.
    """

    __slots__ = (
        "_before_backward",
        "_before_last",
        "_entered",
        "_joined",
        "_newest",
        "_rare",
        "_reference_agreed",
        "_released",
        "_seeds",
        "_unit",
        "_unit_count",
        "accumulating",
        "complete",
        "fed",
        "gradient_sync",
        "groups",
        "held",
        "items",
        "lockstep",
        "models",
        "only",
        "reference",
        "scalars",
        "share",
        "size",
        "watching",
    )  # fmt: skip

    def __init__(
        self, size: int = 1, gradient_sync: GradientSync | None = None, models: Sequence[nn.Module] = ()
    ) -> None:
        self.gradient_sync, self.models = gradient_sync or GradientSync(), models
        self.size = size
        """Micro-batches in a full window (``accumulate_grad_batches``)."""
        self.share: Share = NOT_FROM_LOADER
        """The current micro-batch's share; set by the prepared loader."""
        self.accumulating = False
        """Whether an ``accumulate`` block is open: micro-batches have their weight in the window (``Share.divisor``), not ``Share.alone``."""
        self.held = False
        """Whether the latest ``accumulate`` block left its window open, and no backward pass followed."""
        self.groups = [GradientState()]
        """The states of gradients, one for each optimizer that steps by itself."""
        self.only: GradientState | None = self.groups[0]
        """The only group; ``None`` when there are several."""
        self.lockstep = False
        """Whether all ranks run their backward passes together, as they do for prepared models."""
        self.reference: float | None = None
        """fp16: a power of two by which the sum of a ``Loss`` is divided before backward, so that its gradients fit the format."""
        self.fed = False
        """Whether this rank had a loss in this window."""
        self.complete = False
        """Whether the latest backward pass was of a window's last micro-batch."""
        self.scalars = False
        """Whether any loss was a scalar: on this rank, or on any rank when the ranks last agreed on it."""
        self.items: Tensor | float | None = None
        """Total ``count`` of the latest finished window over all ranks, until it is taken; with several groups that of the first."""
        self.watching = False
        """Whether :meth:`attribute` is to be called after the backward pass."""
        self._newest = self.groups[0]  # with several groups: the state of the latest loss, until its groups are known
        self._before_backward: list[list[Any]] = []  # the groups' traces before a backward pass that is watched
        self._released = self._rare = self._joined = False
        self._before_last: list[list[Any]] = []  # with several groups: their traces before a window's last micro-batch
        # The divisor of a window whose only loss was divided by it before backward, and the count of that loss.
        self._unit: Tensor | float | None = None
        self._unit_count: Tensor | float | None = None
        self._reference_agreed = False
        self._entered = 0  # micro-batches of accumulating loops that came without a prepared loader
        self._seeds: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer; it steps by itself unless :meth:`join` was called."""
        if self._joined or not self.groups[0].optimizers:
            self.groups[0].optimizers.append(optimizer)
            return
        self.groups.append(GradientState([optimizer]))
        self.only = None
        self._newest = GradientState()
        self._newest.closed = True

    def join(self) -> None:
        """Let all optimizers step together on one loss, from now on."""
        self._joined = True
        self._together([optimizer for group in self.groups for optimizer in group.optimizers])

    def leave(self) -> None:
        """Remove all optimizers."""
        self._together([])

    def _together(self, optimizers: list[Optimizer]) -> None:
        """Replace all groups by one with these optimizers."""
        self._newest = self.only = GradientState(optimizers)
        self.groups = [self._newest]

    def state_of(self, optimizer: Optimizer) -> GradientState:
        """The state of this optimizer's gradients."""
        if self.only is not None:
            return self.only
        for group in self.groups:
            if any(optimizer is member for member in group.optimizers):
                return group
        raise RuntimeError(
            f"this {type(optimizer).__name__} was not prepared, but others were: call engine.prepare(optimizer) before backward"
        )

    def is_open(self, group: GradientState) -> bool:
        """Whether more micro-batches of the group's window come before its step."""
        return not self.share.last if self.accumulating else group.held

    def may_clear(self, group: GradientState) -> bool:
        """Whether the gradients may be cleared without a step: the window is complete, or the loop does not accumulate."""
        if not self.accumulating:
            return not group.held
        if not self.share.last or not self.complete:
            return False
        return self.only is not None or self.groups.index(group) in self.reached(self._before_last)

    def enter(self) -> None:
        """Begin a micro-batch of an accumulating loop; without a prepared loader, every :attr:`size`-th micro-batch ends a window."""
        if self.share is NOT_FROM_LOADER or self.share.alone == _COUNTED:
            self._entered += 1
            self.share = Share(size=1, divisor=float(self.size), alone=_COUNTED, last=self._entered % self.size == 0)
        self.accumulating, self.complete = True, False
        if self.only is None and self.share.last:  # `may_clear` asks only in the last micro-batch
            self._before_last = [self.gradient_sync.traces(group.optimizers, self.models) for group in self.groups]

    def exit(self, models: Sequence[nn.Module]) -> None:
        """End an ``accumulate`` block of ``models``; an empty sequence stands for all models."""
        self.accumulating = False
        self.held = is_held = not self.share.last
        if self.only is not None:
            self.only.held = is_held
        else:
            parameter_ids = {id(p) for model in models for p in model.parameters()}
            for group in self.groups:
                if not models or any(id(p) in parameter_ids for p in parameters_of(group.optimizers)):
                    group.held = is_held
        if self.share.alone == _COUNTED:
            self.share = NOT_FROM_LOADER

    # -- backward ---------------------------------------------------------------------------------------------------------------

    def weigh(self, loss: Tensor | Loss, world_size: int, fp16: bool) -> tuple[Tensor, float]:
        """The scalar that backward starts from, and its divisor, which is exact for the current micro-batch; infinity: it counts as zero."""
        newest = self._newest
        if newest.closed:
            self._open()
            if self._rare:
                self._watch(self._released)
        share = self.share
        self.complete = share.last
        if isinstance(loss, Loss):
            return self._weighted(loss, share, world_size, fp16)
        root = loss if type(loss) is Tensor and not loss.ndim and loss.requires_grad else scalar(loss)
        if newest.count is not None:
            raise TypeError(
                "this micro-batch has a scalar loss, an earlier one of the same window has Loss(sum, count): return one kind"
            )
        newest.scalars = self.scalars = self.fed = True
        if fp16 and not self._reference_agreed and self.lockstep:
            self._agree_on_reference(_SCALAR_LOSS)
        if share.size == 0:
            return root, math.inf
        return root, share.divisor if self.accumulating else share.alone

    def _open(self) -> None:
        """Start the next window."""
        newest, several = self._newest, self.only is None
        self.fed = False
        self._rare = several or newest.altered
        if not self._rare and newest.count is None and not newest.dropped and not newest.ready:  # the usual window
            newest.closed = newest.scalars = newest.averaged = False
            return
        for group in self.groups:
            if group.closed and (not group.altered or self._empty(group)):
                group.open()
        if several:
            newest.open()
            newest.closed = True
        elif newest.closed:  # still altered; the next backward pass may or may not reach it
            newest.count, newest.scalars = None, False

    def _empty(self, group: GradientState) -> bool:
        """Whether something other than the optimizer's ``zero_grad`` set the gradients to ``None``."""
        versions = self.gradient_sync.traces(group.optimizers, self.models)
        return bool(versions) and all(grad is None for grad, _ in versions)

    def _watch(self, always: bool = False) -> None:
        """Prepare to detect which groups the next backward pass reaches, if that matters or ``always``."""
        self.watching = always or any(
            group.altered or (group.count is not None and group is not self._newest) for group in self.groups
        )
        if self.watching:
            self._before_backward = [self.gradient_sync.traces(group.optimizers, self.models) for group in self.groups]

    def _weighted(self, loss: Loss, share: Share, world_size: int, fp16: bool) -> tuple[Tensor, float]:
        newest = self._newest
        if newest.scalars:
            raise TypeError(
                "this micro-batch has Loss(sum, count), an earlier one of the same window has a scalar loss: return one kind"
            )
        root, count = scalar(loss.sum), loss.count
        if isinstance(count, Tensor):
            count = full_tensor(count.detach())
        if self.only is None:
            self._watch(True)
        elif newest.count is not None and not self.accumulating and self._empty(newest):
            newest.open()
        if newest.count is None and (self.only is not None or all(group.count is None for group in self.groups)):
            # The whole window in one micro-batch: divide the loss, not the gradients, as a bare loop does.
            alone = world_size == 1 and (share.last or not self.accumulating)
            self._unit, self._unit_count = (nonzero(count), count) if alone else (None, None)
        if share.size == 0:
            count = count * 0.0
        else:
            self.fed = True
        newest.add(count)
        if self._unit is not None:
            return root / self._unit, 1.0
        if fp16 and self.reference is None:
            self._agree_on_reference(float(count))
        return root, (self.reference or 1.0) if share.size else math.inf

    def _agree_on_reference(self, count: float) -> None:
        """Agree with the other ranks on :attr:`reference`, once; waits for the device.

        ``count``: the loss's count, ``_SCALAR_LOSS`` or ``_NO_LOSS``.
        """
        largest_count = self.gradient_sync.largest([count])[0]
        self._reference_agreed = largest_count > _NO_LOSS
        if largest_count >= 0.0:
            self.reference = 2.0 ** math.ceil(math.log2(max(largest_count, 1.0) * self.size))

    def follow(self, weighted: bool) -> None:
        """Record a micro-batch whose loss another rank has (a pipeline's last stage), as that rank's window does. ``weighted``: it is a ``Loss``."""
        if self._newest.closed:
            self._open()
        self.fed, self.complete = True, self.share.last
        for group in self.groups:
            if weighted:
                group.add(0.0)
            else:
                group.scalars = self.scalars = True

    def drop(self, world_size: int, fp16: bool) -> None:
        """Record that the current micro-batch has no loss: its samples do not count (one process), or count with a zero gradient (several)."""
        if self._newest.closed:
            self._open()
        self.complete = self.share.last
        if fp16 and not self._reference_agreed and self.lockstep:
            self._agree_on_reference(_NO_LOSS)
        if world_size == 1 and self.share.size and self.accumulating:
            for group in self.groups:
                group.dropped += 1.0 / self.share.divisor

    def seed(self, divisor: float, like: Tensor) -> Tensor:
        """The gradient with which backward starts from ``like``: 1 / ``divisor``. Shape ``()``, fp32 or fp64; made once for each value.

        This weighs the loss at no cost: multiplying the loss itself would add a node to the graph (10 us a micro-batch).
        """
        key = (divisor, like.device, like.dtype)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) > 256:
                self._seeds.clear()
            # Divided in the format in which autograd divides for (loss / divisor).backward(): the same last bit.
            numerator = torch.ones((), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
            seed = self._seeds[key] = (numerator / divisor).to(like.device, non_blocking=True)
        return seed

    # -- groups that a backward pass has reached ---------------------------------------------------------------------------------

    def reached(self, before: Sequence[list[Any]]) -> list[int]:
        """The indices of the groups whose gradients have changed since the traces ``before`` were taken."""
        traces = [self.gradient_sync.traces(group.optimizers, self.models) for group in self.groups]
        pairs = [zip(old, new, strict=True) for old, new in zip(before, traces, strict=True)]
        return [i for i, pair in enumerate(pairs) if any(a[0] is not b[0] or a[1] != b[1] for a, b in pair)]

    def attribute(self) -> None:
        """Record that the gradients of each group that the finished backward pass has reached contain its loss; their divisor depends on it.

        Raises:
            TypeError: a scalar loss and a ``Loss`` have reached the gradients of one optimizer.
            RuntimeError: the pass added to gradients that were divided, unscaled or clipped for a step that has not happened.
        """
        newest, several = self._newest, self.only is None
        before, self.watching, self._released, self._before_backward = self._before_backward, False, False, []
        for i in self.reached(before):
            group = self.groups[i]
            if group.altered:
                names = ", ".join(type(o).__name__ for o in group.optimizers)
                raise RuntimeError(
                    f"this backward pass added to gradients of {names} that were clipped, unscaled or divided already, before their step: "
                    "call optimizer.step() or optimizer.zero_grad() before it, or clip after the last backward pass"
                )
            if not self.accumulating:
                group.held = False
            if not several:
                continue
            holds_scalar = group.count is None and not group.used and any(grad is not None for grad, _ in before[i])
            if (newest.count is not None and (group.scalars or holds_scalar)) or (
                newest.scalars and group.count is not None
            ):
                raise TypeError(
                    "a scalar loss and a Loss(sum, count) have reached the parameters of one optimizer before its step: return one kind"
                )
            group.used = False
            if newest.count is not None:
                group.add(newest.count)

    def release(self) -> None:
        """Begin a backward pass outside of ``accumulate``: the window of each group that it reaches is complete."""
        self.held, self._released = False, self.only is None
        if self.only is not None:
            self.only.held = False

    # -- the end of a window ----------------------------------------------------------------------------------------------------

    def close(self, group: GradientState, sum_over_ranks: Sum, ranks: Group, loss_ranks: int) -> Tensor | float | None:
        """Close a group's window. Return the divisor that its gradients still need, or ``None``: the same value until the next backward pass."""
        if group.closed:
            return group.total
        if ranks.world_size > 1 and not group.kind:
            self._agree_on_kind(group)
        weighted = group.count is not None or (group.kind == WEIGHTED and not group.scalars)
        if ranks.world_size == 1 or not weighted or self._unit is not None:
            if group is self.groups[0]:
                self.items = group.count
            group.total = self._divisor_of_one(group)
            group.kind = SCALAR if group.kind and not weighted else group.kind
        else:
            group.kind = WEIGHTED
            summed = sum_over_ranks(packed(group.count, self.fed, ranks.device))
            if not self.fed:  # this rank alone waits for the device
                self.fed = bool(summed[1])
            if group is self.groups[0]:
                self.items = summed[0]
            group.total = nonzero(summed[0] / (loss_ranks * (self.reference or 1.0)))
        group.closed = True
        return group.total

    def _divisor_of_one(self, group: GradientState) -> Tensor | float | None:
        """The divisor that the gradients still need if no sum over ranks is due: in one process, and for scalar losses."""
        if group.count is not None:
            if self._unit is not None:
                return None if group.count is self._unit_count else nonzero(group.count) / self._unit
            return nonzero(group.count / (self.reference or 1.0))
        return 1.0 - group.dropped if group.scalars and 0.0 < group.dropped < 1.0 else None

    def _agree_on_kind(self, group: GradientState) -> None:
        """Agree on the kind of losses, in the first window in which some rank had one, so that ranks without join the collectives at its end.

        Raises:
            TypeError: the ranks' losses are of different kinds (on all ranks).
        """
        flags = (group.scalars, group.count is not None, self.scalars)
        scalars, weighted, any_scalar = self.gradient_sync.largest([float(flag) for flag in flags])
        self.scalars = bool(any_scalar)
        if scalars and weighted:
            raise TypeError("a scalar loss on one rank and Loss(sum, count) on another in one window: return one kind")
        group.kind = WEIGHTED if weighted else SCALAR if any_scalar else 0

    def state_dict(self) -> dict[str, Any]:
        """The state on which later windows depend; between two windows it is the same on all ranks."""
        return {"scalars": self.scalars, "reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.scalars, self.reference = state["scalars"], state["reference"]
        self._reference_agreed = self.reference is not None

    def discard(self) -> None:
        """End the window without a step; its gradients are discarded."""
        self.fed = self.held = False
        self._entered = 0  # the next micro-batch is the first of a window
        for group in self.groups:
            group.cleared()
            group.held = False
