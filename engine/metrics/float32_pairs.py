"""Sums on a device without float64 (an Apple GPU): in pairs of float32, whose second number holds the rounding error of the first.

Error-free sums and products are Knuth's and Dekker's, as in Ogita, Rump and Oishi, "Accurate sum and dot product" (2005). A pair
has 48 bits; float64 has 53.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SPLIT = 2.0**12 + 1
"""Dekker's: cuts float32's 24 bits in two halves."""


def folded(values: list[Any], weights: list[Any], reduce: str, device: torch.device) -> list[tuple[Any, Any]]:
    """Fold many values and weights into few, without changing the sum of ``value * weight`` and the sum of weights; for ``"sum"`` the sum of values.

    Nothing waits for the device.

    Args:
        values, weights: numbers, and tensors with one element.
        reduce: ``"mean"`` or ``"sum"``.
        device: of the results.
    """
    high, low = _columns(values, device)
    if reduce == "sum":
        return [(part, 1.0) for part in _summed(high, low)]
    heights, lows = _columns(weights, device)
    product = high * heights
    total = _summed(product, _finite(_lost(high, heights, product)) + _finite(high * lows + low * heights))
    # The two parts of the sum count once each, which the last entry takes back: the sum of weights stays the weights'.
    return [*((part, 1.0) for part in total), *((0.0, part) for part in _summed(heights, lows)), (0.0, -2.0)]


def _columns(items: list[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """The items rounded to float32, and their rounding errors. Shapes [n]."""
    plain = torch.tensor([0.0 if isinstance(i, Tensor) else float(i) for i in items], dtype=torch.float64)
    high = plain.float()
    low = _finite((plain - high.double()).float())
    high, low = high.to(device, non_blocking=True), low.to(device, non_blocking=True)
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            item = item.detach().reshape(())
            high[index] = item.to(device, torch.float32, non_blocking=True)
            if not item.dtype.is_floating_point and item.dtype != torch.bool:
                low[index] = (item.to(device, non_blocking=True) - high[index].to(item.dtype)).float()
            elif item.dtype == torch.float64:  # on another device
                low[index] = _finite((item - item.float().double()).float()).to(device, non_blocking=True)
    return high, low


def _summed(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of both columns as a pair. Shapes ``()``."""
    lost = low.sum()
    while high.numel() > 1:
        a, b = torch.nn.functional.pad(high, (0, high.numel() % 2)).chunk(2)
        high = a + b
        back = high - a
        lost = lost + ((a - (high - back)) + (b - back)).sum()
    whole = high.reshape(())
    return whole, torch.where(whole.isfinite(), lost, torch.zeros_like(lost))


def _lost(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """The rounding error of ``a * b``: the exact product minus ``product``."""
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    large = x * _SPLIT
    first = large - (large - x)
    return first, x - first


def _finite(x: Tensor) -> Tensor:
    """A correction; none where numbers are infinite, or so large that it cannot be computed."""
    return torch.where(x.isfinite(), x, torch.zeros_like(x))
