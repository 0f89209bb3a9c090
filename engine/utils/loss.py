"""``Loss``: a loss as a sum over a number of items."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.utils.torch_private import register_dataclass

LEAVE_OUT = (
    "return Loss(out.sum() * 0, 0) to leave this micro-batch out. If it is None or empty, as a collate function that leaves out samples may make it, "
    "out is the module's output for any other input"
)
"""The end of an error where ranks run backward passes together, so that ``training_step`` must return a loss for each micro-batch."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a sum over ``count`` items, for means over unequal numbers of items (the tokens of a language model).

    The step's gradient is that of (total ``sum``) / (total ``count``); totals are over the window's micro-batches and all ranks.
    A step without any item has zero gradients.
    """

    sum: Tensor
    """Scalar tensor with an autograd graph."""
    count: Tensor | float
    """Number of items summed over; a tensor stays on its device."""


# FSDP looks for tensors in what a step returns, to gather the model again before their backward pass; torch 2.11 does not look into dataclasses.
register_dataclass(Loss)


def nonzero(count: Tensor | float) -> Tensor | float:
    """Return ``count``, or 1 if it is 0, so that an empty sum divided by it is 0."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, torch.ones_like(count), count)
    return count or 1.0


def mean_of(loss: Loss) -> tuple[Tensor, Tensor | float]:
    """The mean of a loss over its items, and its count, as values to keep: without a graph, and copies."""
    count = loss.count.detach().clone() if isinstance(loss.count, Tensor) else loss.count
    return loss.sum.detach() / nonzero(count), count
