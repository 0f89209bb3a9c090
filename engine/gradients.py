"""Exact gradients: what a loss weighs, when its window ends, and the one pass that finishes the gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from engine.data.sampler import ALONE, Share
from engine.log import warn_once
from engine.tree import whole


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over ``count`` items, for means over unequal numbers of items (the tokens of a language model).

    The step's gradient is that of (sum over the window and all ranks of ``sum``) / (the same sum of ``count``).
    A step without any item has zero gradients.
    """

    sum: Tensor
    """Scalar with a graph."""
    count: Tensor | float
    """Items summed over; a tensor stays on its device."""


# FSDP looks for tensors in what a step returns, to gather the model again before their backward pass; torch 2.11 does not look into dataclasses.
pytree.register_dataclass(Loss)


class Window:
    """The gradient state that loaders, backward passes and optimizer steps of one engine share."""

    __slots__ = (
        "_finished",
        "_first",
        "_newest",
        "_scalars",
        "_seeds",
        "accumulating",
        "count",
        "dropped",
        "fed",
        "losses",
        "reference",
        "share",
        "size",
        "total",
    )  # fmt: skip

    def __init__(self, size: int = 1) -> None:
        self.size = size
        """Micro-batches in a full window (``accumulate_grad_batches``)."""
        self.share: Share = ALONE
        """The current micro-batch's; set by the prepared loader that gave it out."""
        self.accumulating = False
        """Whether the loop accumulates: the window's own weights hold, not the micro-batch's alone."""
        self.count: Tensor | float | None = None
        """Items of the ``Loss`` objects of this window so far, on this rank."""
        self.losses = 0
        self.dropped = 0.0
        """The part of the window (of 1) whose micro-batches had no loss; known on one process only."""
        self.reference: float | None = None
        """fp16: a power of two that sums are divided by before backward, so that their gradients fit the format."""
        self.total: Tensor | float | None = None
        """What the finished window's gradients are still to be divided by; ``None``: nothing."""
        self._finished = False
        self._scalars = False
        self.fed = False
        """Whether this window is a step: a micro-batch gave a loss, or one of another rank may have."""
        self._first: Tensor | float | None = None
        self._newest: Tensor | float | None = None
        self._seeds: dict[tuple[float, torch.device], Tensor] = {}

    def open(self) -> None:
        """Begin a new window after a finished one."""
        self._finished = self._scalars = self.fed = False
        if self.count is not None or self.dropped:
            self.count, self.total, self.losses, self.dropped, self._first = None, None, 0, 0.0, None

    def root(self, loss: Tensor | Loss, world_size: int, agree: Callable[[float], float] | None) -> tuple[Tensor, float]:
        """The scalar that backward starts from, and what it is divided by; both are exact for the current micro-batch.

        ``agree`` (fp16 only) gives the largest of a number over all ranks.
        """
        if self._finished:
            self.open()
        share = self.share
        if isinstance(loss, Loss):
            return self._weighted(loss, share, world_size, agree)
        root = loss if type(loss) is Tensor and not loss.ndim and loss.requires_grad else _scalar(loss)
        if self.count is not None:
            raise TypeError("this micro-batch gave a scalar loss, an earlier one of the same window gave Loss(sum, count): return one kind")
        self._scalars = self.fed = True
        if share.size == 0:
            return root, math.inf
        return root, share.divisor if self.accumulating else share.alone

    def _weighted(self, loss: Loss, share: Share, world_size: int, agree: Callable[[float], float] | None) -> tuple[Tensor, float]:
        if self._scalars:
            raise TypeError("this micro-batch gave Loss(sum, count), an earlier one of the same window gave a scalar loss: return one kind")
        root, count = _scalar(loss.sum), loss.count
        self.fed = True
        if isinstance(count, Tensor):
            count = whole(count.detach())
        if world_size == 1 and self.count is None and (share.last or not self.accumulating):
            # The whole window in one micro-batch: divide the loss, not the gradients, as a bare loop does.
            self.count, self._first = count, nonzero(count)
            return root / self._first, 1.0
        if share.size == 0:
            count = count * 0.0
        self._add(count, agree)
        if self._first is not None:  # another loss on the micro-batch that was taken for the whole window
            root = root / self._first
        return root, (self.reference or 1.0) if share.size else math.inf

    def _add(self, count: Tensor | float, agree: Callable[[float], float] | None) -> None:
        if agree is not None and self.reference is None:  # once: this waits for the device
            self.reference = 2.0 ** math.ceil(math.log2(max(agree(float(count)), 1.0) * self.size))
        self.count = count if self.count is None else self.count + count
        self.losses += 1
        self._newest = count

    def follow(self, weighted: bool) -> None:
        """Another rank has this micro-batch's loss: be in the same state as its window."""
        if self._finished:
            self.open()
        self.fed = True
        if weighted:
            self._add(0.0, None)
        else:
            self._scalars = True

    def seed(self, divisor: float, device: torch.device) -> Tensor:
        """The gradient to start backward with: 1 / ``divisor``. Shape ``()``, fp32; made once for each value.

        It weighs the loss at no cost: multiplying the loss itself would add a node to the graph (10 us a micro-batch).
        """
        key = (divisor, device)
        found = self._seeds.get(key)
        if found is None:
            if len(self._seeds) > 256:
                self._seeds.clear()
            # The division is made in fp32, as autograd makes it for (loss / divisor).backward(): the same last bit.
            one = torch.ones((), dtype=torch.float32)
            found = self._seeds[key] = (one / divisor).to(device, non_blocking=True)
        return found

    def drop(self, world_size: int, agree: Callable[[float], float] | None = None) -> None:
        """The current micro-batch gave no loss: its samples do not count (one process), or count with a zero gradient (several)."""
        if self._finished:
            self.open()
        if world_size > 1:
            # Other ranks may have a loss: this one takes part in the collectives of its kind, and in the step.
            self.fed = True
            if self._newest is not None:
                self._add(self._newest * 0, agree)
        elif self.share.size:
            self.dropped += 1.0 / self.share.divisor if self.accumulating else 0.0

    def close_whole(self) -> bool:
        """Close a window whose weights were all known before its backward passes, the usual case; False for another one."""
        if self.losses or self.dropped:
            return False
        self._finished = True
        return True

    def finish(self, sum_over_ranks: Callable[[Tensor | float], Tensor | float], world_size: int) -> Tensor | float | None:
        """Close the window: what its gradients are still to be divided by, or ``None``. Later calls before a backward give the same."""
        if not self._finished:
            self._finished = True
            if self.losses:
                assert self.count is not None
                self.total = nonzero(sum_over_ranks(self.count) / (world_size * (self.reference or 1.0)))
                if self._first is not None:
                    self.total = self.total / self._first
            elif self._scalars and 0.0 < self.dropped < 1.0:
                self.total = 1.0 - self.dropped
        return self.total


def nonzero(count: Tensor | float) -> Tensor | float:
    """``count``, or 1 where it is 0: a sum over nothing divided by it gives 0."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, torch.ones_like(count), count)
    return count or 1.0


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"a loss must be a scalar tensor or Loss(sum, count), got {type(loss).__name__}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph, so nothing would be trained: it was computed under no_grad, detached, made with .item(), "
            "or all parameters that it depends on are frozen (requires_grad=False)"
        )
    loss = whole(loss)
    if loss.ndim:
        if loss.numel() != 1:
            raise ValueError(f"a loss must have one element, got shape {tuple(loss.shape)}: reduce it, for example with .mean()")
        return loss.reshape(())
    return loss


def loss_in(outputs: Any, who: str) -> Any:
    """The loss inside a training step's outputs, or ``None``. ``who``: the class of the module, for messages."""
    if outputs is None or isinstance(outputs, (Tensor, Loss)):
        return outputs
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"{who}.training_step returned {type(outputs).__name__}; "
            "possible: a scalar tensor, Loss(sum, count), a dict with one of them under 'loss', or None"
        )
    if "loss" not in outputs:
        raise ValueError(f"{who}.training_step returned a dict without 'loss'; its keys: {', '.join(map(str, outputs))}")
    return outputs["loss"]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """One tensor or several, as torch's clipping functions take them."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The optimizers' parameters, each once."""
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        first: list[Tensor] = optimizers[0].param_groups[0]["params"]
        return first
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())


@torch.no_grad()
def divide(grads: list[Tensor], divisor: Tensor | float) -> None:
    """Divide in place, one fused pass for each device and dtype."""
    if grads:
        scale(grads, 1.0 / divisor if isinstance(divisor, float) else divisor.double().reciprocal())


@torch.no_grad()
def scale(grads: list[Tensor], factor: Tensor | float) -> None:
    """Multiply in place, one fused pass for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), group in groups.items():
        by = factor.to(device, dtype, non_blocking=True) if isinstance(factor, Tensor) else factor
        if any(g.is_sparse for g in group):
            for g in group:
                g.mul_(by)
        else:
            torch._foreach_mul_(group, by)


@torch.no_grad()
def clip_values(grads: list[Tensor], limit: float) -> None:
    """Clamp each element to [-limit, limit] in place."""
    for grad in grads:
        grad.clamp_(-limit, limit)


@torch.no_grad()
def clip_norm(grads: list[Tensor], norm: Tensor, limit: float, divisor: Tensor | float | None) -> Tensor:
    """Divide by ``divisor`` and scale down to a norm of at most ``limit``, in one pass; the divided gradients' norm, shape ``()``."""
    if divisor is not None:
        norm = norm / divisor
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    scale(grads, factor if divisor is None else factor / divisor)
    return norm


def where_nonfinite(
    named_parameters: Iterable[tuple[str, Tensor]], local: Callable[[list[Tensor]], list[Tensor]] = lambda grads: grads
) -> list[str]:
    """Names of the parameters whose gradient, or the part of it that ``local`` gives, has a NaN or an infinity. Waits for the device."""
    return [name for name, p in named_parameters if p.grad is not None and not bool(local([p.grad])[0].isfinite().all())]


def joins(parameters: Iterable[Tensor]) -> Tensor:
    """A zero with a graph to every trained parameter: its backward takes part in the other ranks' gradient reduction."""
    warn_once(
        "training_step returned None with several ranks: the micro-batch counts with a zero gradient. "
        "To leave samples out exactly, return Loss(sum, count) with the count that is left."
    )
    total = sum(p.flatten()[0] * 0.0 for p in parameters if p.requires_grad)
    assert isinstance(total, Tensor)
    return total
