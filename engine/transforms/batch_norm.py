"""Batch norm over the samples of all ranks (``sync_batchnorm=True``): N ranks normalise a micro-batch as a single process would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.distributed.group import Group
from engine.utils.loss import LEAVE_OUT
from engine.utils.torch_private import BatchNorm, without_dynamo


class Ranks:
    """The ranks that compute a layer's statistics together.

    Args:
        group: the ranks whose losses are averaged.
        counts: says whether this rank's current samples count; those of a repeated micro-batch, which keeps the collectives matched, do not.
    """

    def __init__(self, group: Group, counts: Callable[[], bool]) -> None:
        self.group, self.counts = group, counts

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copy of the model (such as an average of weights) belongs to the same job

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickle belongs to no job


class Synchronised(BatchNorm):
    """A batch norm that takes its statistics in training from all ranks' samples; in evaluation it is a plain batch norm."""

    ranks: Ranks | None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.ranks is None:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, total = _normalise(input, self.weight, self.bias, self.eps, self.ranks)
        if self.track_running_stats and self.running_mean is not None:
            with torch.no_grad():
                self._track(mean, var, total)
        return output

    def _track(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        """Update the running statistics."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(mean.dtype)
        unbiased = var * (total / (total - 1.0).clamp(min=1.0))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_((1.0 - momentum) * running + momentum * new)


class Layers:
    """The batch norms of an engine that compute over all ranks. If this is off, or in a single process, all methods do nothing."""

    def __init__(self, enabled: bool, group: Group, counts: Callable[[], bool]) -> None:
        self._ranks = Ranks(group, counts) if enabled and group.world_size > 1 else None
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []

    def convert(self, model: nn.Module) -> nn.Module:
        """Make the batch norms of ``model`` compute over all ranks, in place: names, parameters, hooks and references stay.

        Raises:
            ValueError: a batch norm has its own forward pass.
        """
        for name, module in model.named_modules() if self._ranks is not None else ():
            if not isinstance(module, BatchNorm) or isinstance(module, nn.SyncBatchNorm):
                continue
            cls: type[nn.Module] = type(module)
            if not isinstance(module, Synchronised):
                if cls.forward is not BatchNorm.forward or "forward" in vars(module):
                    raise ValueError(
                        f"sync_batchnorm=True: {name or 'the model'} ({cls.__name__}) is a batch norm with its own forward pass, which would "
                        "not be synchronised: use nn.BatchNorm1d, 2d or 3d there, or synchronise it yourself and leave the setting out"
                    )
                module.__class__ = _synchronised(cls)  # type: ignore[assignment]
                self._changed.append((module, cls))
            module.ranks = self._ranks  # type: ignore[assignment]
        return model

    def refuse_none(self) -> None:
        """Refuse a micro-batch without a loss. Called when this rank has none.

        Raises:
            ValueError: there are converted layers, so the other ranks' backward passes would wait for this rank.
        """
        if self._changed and self._ranks is not None:
            raise ValueError(
                f"training_step returned None on rank {self._ranks.group.rank} with sync_batchnorm=True, under which all ranks run backward "
                f"passes together: {LEAVE_OUT}"
            )

    def restore(self) -> None:
        """Turn the layers back into plain ones, except layers whose class was changed again (by sharding)."""
        for module, cls in self._changed:
            if isinstance(module, Synchronised):
                module.ranks = None
                if type(module) is _synchronised(cls):
                    module.__class__ = cls  # type: ignore[assignment]
                    del module.ranks
        self._changed.clear()


_subclasses: dict[type[nn.Module], type[nn.Module]] = {}


def _synchronised(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``Synchronised`` and ``cls``, so that ``isinstance`` and the check of the input's dimensions still work."""
    if cls not in _subclasses:
        _subclasses[cls] = type(
            cls.__name__, (Synchronised, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        )
    return _subclasses[cls]


class _Normalise(torch.autograd.Function):
    """Normalises ``[N, C, ...]`` by the mean and variance of all ranks' samples; also returns both (``[C]``) and the samples' number (``[]``).

    Forward and backward take one collective each, and do not wait for the device. Statistics of half-precision input are computed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks) -> Any:
        channels, wide = x.shape[1], _wide(x)
        number = x.numel() // channels if ranks.counts() else 0
        if number:
            # The mean and the squared distances from it are combined, because sums of squares lose digits.
            var, mean = torch.var_mean(wide, _dims(x), correction=0)
        else:
            var = mean = wide.new_zeros(channels)
        row = torch.cat([mean, var, wide.new_full((1,), number)])
        rows = [torch.empty_like(row) for _ in range(ranks.group.world_size)]
        dist.all_gather(rows, row, group=ranks.group.wide)
        statistics = torch.stack(rows)
        means, variances, numbers = statistics[:, :channels], statistics[:, channels:-1], statistics[:, -1:]
        total = numbers.sum().clamp(min=1.0)
        mean = (means * numbers).sum(0) / total
        var = ((variances + (means - mean).square()) * numbers).sum(0) / total
        gain, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        y = F.batch_norm(x, mean, var, gain, shift, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), total)
        ctx.number, ctx.group, ctx.bias = number, ranks.group, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, total)
        return y, mean, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        dims, shape = _dims(x), [1, -1, *(1 for _ in x.shape[2:])]
        wide, centred = _wide(grad), _wide(x) - mean.view(shape)
        sums = torch.cat([wide.sum(dims), (wide * centred).sum(dims)])
        channels = x.shape[1]
        grad_weight = None if weight is None else (sums[channels:] * scale).to(weight.dtype)
        grad_bias = None if ctx.bias is None else sums[:channels].to(ctx.bias)
        sums = sums.clone()
        dist.all_reduce(sums, group=ctx.group.wide)
        sums /= total
        gain = scale if weight is None else scale * weight.to(scale.dtype)
        if not ctx.number:  # this rank's samples did not count, so the statistics do not depend on them
            return (wide * gain.view(shape)).to(x.dtype), grad_weight, grad_bias, None, None
        grad_x = wide - sums[:channels].view(shape) - centred * (scale.square() * sums[channels:]).view(shape)
        return (grad_x * gain.view(shape)).to(x.dtype), grad_weight, grad_bias, None, None


@without_dynamo
def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks) -> Any:
    return _Normalise.apply(x, weight, bias, eps, ranks)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]
