"""The cross entropy of hidden states and an output layer's weight, computed for a few rows at a time.

The logits of all rows, ``[rows, vocabulary]``, never exist. Those of a chunk are computed in fp32 (fp64 if the inputs are) and turned in place into
the gradient with respect to themselves, so that a chunk needs one such matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 32 * 2**20
"""Bytes of a chunk's fp32 logits from which on larger chunks of a narrow layer are not faster (measured on a CPU: widths 256 and 512, vocabularies
32,000 and 131,072)."""
LARGEST_NUMBER = 32
"""The number of chunks of a call, which is also their number in a compiled graph."""


def rows_of_chunk(rows: int, vocabulary: int, width: int) -> int:
    """The number of rows in a chunk. It depends on sizes alone, because the order of sums, and with it the last bits, depends on it.

    A chunk's logits take at most a quarter of the memory of the weight's gradient, ``[vocabulary, width]``, or ``CHUNK_BYTES``, or 1/32 of all
    logits.
    """
    return max(CHUNK_BYTES // (4 * max(vocabulary, 1)), width // 4, -(-rows // LARGEST_NUMBER), 1)


@dataclass(frozen=True)
class Form:
    """A cross entropy's arguments, and where this rank's part of the vocabulary is."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    scale: float
    vocabulary: int
    """The number of classes on all ranks."""
    first: int
    """The first class of this rank's part."""
    group: dist.ProcessGroup | None
    """The ranks that the vocabulary is sharded over; ``None``: this rank has all of it."""
    rows: int
    """Rows of a chunk."""
    dtype: torch.dtype
    """Format of the matrix products."""

    @property
    def wide(self) -> torch.dtype:
        """Format of logits and losses."""
        return torch.promote_types(torch.float32, self.dtype)

    def chunks(self, rows: int) -> Iterator[slice]:
        """The chunks of so many rows."""
        return (slice(start, min(start + self.rows, rows)) for start in range(0, rows, self.rows))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The logits of a chunk, a new tensor ``[rows, classes]``, and their slope: the derivative with respect to the layer's output if that is not
        ``scale`` everywhere."""
        product = torch.mm(hidden, weight.t()) if bias is None else torch.addmm(bias, hidden, weight.t())
        logits = product.to(self.wide)
        if self.softcap is None:
            return logits if self.scale == 1.0 else logits.mul_(self.scale), None
        tangent = logits.mul_(self.scale / self.softcap).tanh_()
        return tangent * self.softcap, tangent.square_().neg_().add_(1.0).mul_(self.scale)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each row whether it counts, whether its target is on this rank, and the target's column here (0 if it is not), ``[rows, 1]``."""
        counted = targets != self.ignore_index
        if self.group is None:
            return counted, counted, torch.where(counted, targets, 0).unsqueeze(1)
        return counted, *self._places_in_part(targets, counted)

    def _places_in_part(self, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        size = part_of(self.vocabulary, self.group)[1]
        mine = counted & (targets >= self.first) & (targets < self.first + size)
        return mine, torch.where(mine, targets - self.first, 0).unsqueeze(1)


def part_of(vocabulary: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The first class and the number of classes that this rank has when ``DTensor`` shards the vocabulary over ``group``."""
    if group is None:
        return 0, vocabulary
    size = -(-vocabulary // dist.get_world_size(group))
    first = min(dist.get_rank(group) * size, vocabulary)
    return first, min(size, vocabulary - first)


def _losses(form: Form, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn a chunk's logits into ``exp(logits - largest)``, in place.

    Returns:
        Each row's loss (0 where it does not count); the logarithm of its sum of exponentials; that sum after the largest logit was taken out; and the
        exponentials. The first three have shape ``[rows]`` and are those of the whole vocabulary.
    """
    counted, mine, column = form.places(targets)
    if logits.shape[1]:
        largest, target = logits.amax(1), torch.where(mine, logits.gather(1, column).squeeze(1), 0.0)
    else:  # a rank without classes
        largest, target = logits.new_full((logits.shape[0],), -torch.inf), logits.new_zeros(logits.shape[0])
    if form.group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=form.group)
    total = logits.sum(1) if form.label_smoothing else None
    exponentials = logits.sub_(largest.unsqueeze(1)).exp_()
    summed = exponentials.sum(1)
    if form.group is not None:
        packed = torch.stack([summed, target] if total is None else [summed, target, total])
        dist.all_reduce(packed, group=form.group)
        summed, target, total = packed[0], packed[1], None if total is None else packed[2]
    normalizer = largest + summed.log()
    loss = normalizer - (1.0 - form.label_smoothing) * target
    if total is not None:
        loss = loss - form.label_smoothing / form.vocabulary * total
    if form.z_loss:
        loss = loss + form.z_loss * normalizer.square()
    return torch.where(counted, loss, 0.0), normalizer, summed, exponentials


def _to_gradient(
    form: Form,
    exponentials: Tensor,
    summed: Tensor | None,
    normalizer: Tensor,
    slope: Tensor | None,
    targets: Tensor,
    seeds: Tensor | None,
) -> Tensor:
    """Turn a chunk's exponentials into the gradient with respect to the layer's output, in place, in the format of the matrix products.

    Args:
        summed: each row's sum of exponentials; ``None``: they add up to 1.
        seeds: the gradients with respect to the rows' losses; ``None``: 1.
    """
    counted, mine, column = form.places(targets)
    all_seeds = torch.ones_like(normalizer) if seeds is None else seeds
    seeds = torch.where(counted, all_seeds, 0.0)
    factor = seeds * (1.0 + 2.0 * form.z_loss * normalizer) if form.z_loss else seeds
    gradient = exponentials.mul_((factor if summed is None else factor / summed).unsqueeze(1))
    if form.label_smoothing:
        gradient.sub_((seeds * (form.label_smoothing / form.vocabulary)).unsqueeze(1))
    if gradient.shape[1]:
        of_target = torch.where(mine, seeds * (1.0 - form.label_smoothing), 0.0).unsqueeze(1)
        gradient.scatter_(1, column, gradient.gather(1, column) - of_target)
    if slope is not None:
        gradient.mul_(slope)
    elif form.scale != 1.0:
        gradient.mul_(form.scale)
    return gradient.to(form.dtype)


class _Gradients:
    """The gradients of one call, added up over its chunks; ``needed``: of hidden states, weight and bias."""

    def __init__(
        self, form: Form, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self.form, self.needs_weight = form, needed[1]
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight: Tensor | None = None
        self.bias = (
            torch.zeros_like(bias, dtype=torch.promote_types(form.wide, bias.dtype))
            if bias is not None and needed[2]
            else None
        )

    def add(self, chunk: slice, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add those of a chunk, from the gradient with respect to the layer's output."""
        if self.hidden is not None:
            self.hidden[chunk] = torch.mm(of_logits, weight)
        if self.needs_weight:
            if self.weight is None:
                self.weight = torch.mm(of_logits.t(), hidden).to(self.form.wide)
            elif self.weight.dtype == of_logits.dtype:
                self.weight.addmm_(of_logits.t(), hidden)
            else:  # in half precision the sum over chunks is one of fp32
                self.weight += torch.mm(of_logits.t(), hidden)
        if self.bias is not None:
            self.bias += of_logits.sum(0, dtype=self.bias.dtype)

    def finished(self, weight: Tensor) -> list[Tensor | None]:
        """The three gradients; of hidden states summed over the ranks that share the vocabulary."""
        if self.hidden is not None and self.form.group is not None:
            dist.all_reduce(self.hidden, group=self.form.group)
        if self.needs_weight and self.weight is None:  # no rows
            self.weight = torch.zeros_like(weight, dtype=self.form.wide)
        return [self.hidden, self.weight, self.bias]


def _check_order() -> None:
    """Raise ``RuntimeError`` in a backward pass that creates a graph: these gradients would have none, and a penalty of them would train nothing."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "a backward pass with create_graph=True through linear_cross_entropy or token_log_probs, which has no second derivative: compute plain "
            "logits"
        )


class SummedLoss(torch.autograd.Function):
    """The sum of the rows' losses; gradients are computed in the forward pass, so that three matrix products are enough, as for plain logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form) -> Tensor:
        cast, cast_bias = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
        gradients = _Gradients(form, hidden, weight, bias, ctx.needs_input_grad)
        total = torch.zeros((), dtype=form.wide, device=hidden.device)
        for chunk in form.chunks(hidden.shape[0]):
            rows = hidden[chunk].to(form.dtype)
            logits, slope = form.logits(rows, cast, cast_bias)
            losses, normalizer, summed, exponentials = _losses(form, logits, targets[chunk])
            total += losses.sum()
            of_logits = _to_gradient(form, exponentials, summed, normalizer, slope, targets[chunk], None)
            del logits, exponentials, slope
            gradients.add(chunk, of_logits, rows, cast)
            del of_logits
        # Kept by the context: the backward pass scales them in place, and activations that are moved to the host are saved tensors.
        ctx.gradients, ctx.dtypes = (
            gradients.finished(weight),
            (hidden.dtype, weight.dtype, form.wide if bias is None else bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        _check_order()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "a second backward pass through linear_cross_entropy, whose gradients the first one has used up: give it recompute=True"
            )
        scaled = [None if g is None else g.mul_(seed).to(d) for g, d in zip(gradients, ctx.dtypes, strict=True)]
        return *scaled, None, None


class RowLosses(torch.autograd.Function):
    """Each row's loss, shape ``[rows]``; logits are computed a second time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form) -> Tensor:
        losses, normalizers = row_losses(hidden, weight, bias, targets, form)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers)
        ctx.form = form
        return losses

    @staticmethod
    def backward(ctx: Any, seeds: Tensor) -> Any:
        _check_order()
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        form: Form = ctx.form
        cast, cast_bias = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
        gradients = _Gradients(form, hidden, weight, bias, ctx.needs_input_grad)
        for chunk in form.chunks(hidden.shape[0]):
            rows = hidden[chunk].to(form.dtype)
            logits, slope = form.logits(rows, cast, cast_bias)
            normalizer = normalizers[chunk]
            exponentials = logits.sub_(normalizer.unsqueeze(1)).exp_()
            of_logits = _to_gradient(form, exponentials, None, normalizer, slope, targets[chunk], seeds[chunk])
            del logits, exponentials, slope
            gradients.add(chunk, of_logits, rows, cast)
            del of_logits
        dtypes = (hidden.dtype, weight.dtype, form.wide if bias is None else bias.dtype)
        return (
            *(None if g is None else g.to(d) for g, d in zip(gradients.finished(weight), dtypes, strict=True)),
            None,
            None,
        )


def row_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and the logarithm of its sum of exponentials; shapes ``[rows]``, without a graph."""
    cast, cast_bias = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
    losses = torch.empty(hidden.shape[0], dtype=form.wide, device=hidden.device)
    normalizers = torch.empty_like(losses)
    for chunk in form.chunks(hidden.shape[0]):
        logits, _ = form.logits(hidden[chunk].to(form.dtype), cast, cast_bias)
        losses[chunk], normalizers[chunk], *_ = _losses(form, logits, targets[chunk])
        del logits
    return losses, normalizers
