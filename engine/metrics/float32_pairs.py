"""Sums on a device without float64 (an Apple GPU), as pairs of float32 whose second number is the rounding error of the first.

The error-free sums and products are Knuth's and Dekker's, as in Ogita, Rump and Oishi, "Accurate sum and dot product" (2005). A pair
has a precision of 48 bits; float64 has 53.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SPLIT = 2.0**12 + 1
"""Dekker's factor, which splits the 24 bits of a float32 into two halves."""


def folded(values: list[Any], weights: list[Any], reduce: str, device: torch.device) -> list[tuple[Any, Any]]:
    """Reduce to a few (value, weight) pairs with the same sum of ``value * weight`` and the same sum of weights; for ``"sum"``, with the same sum
    of values. Does not wait for the device.

    Args:
        values, weights: numbers, or tensors with one element.
        reduce: ``"mean"`` or ``"sum"``.
        device: the device of the results.
    """
    high, low = _columns(values, device)
    if reduce == "sum":
        return [(part, 1.0) for part in _sum_as_pair(high, low)]
    heights, lows = _columns(weights, device)
    product = high * heights
    total = _sum_as_pair(
        product, _finite(_product_error(high, heights, product)) + _finite(high * lows + low * heights)
    )
    # Both parts of the sum have weight 1. The last pair subtracts these 2, so that the sum of weights stays that of ``weights``.
    return [*((part, 1.0) for part in total), *((0.0, part) for part in _sum_as_pair(heights, lows)), (0.0, -2.0)]


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
            elif item.dtype == torch.float64:  # a tensor on another device than ``device``, which has no float64
                low[index] = _finite((item - item.float().double()).float()).to(device, non_blocking=True)
    return high, low


def _sum_as_pair(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of both columns, as a pair. Shapes ``()``."""
    lost = low.sum()
    while high.numel() > 1:
        a, b = torch.nn.functional.pad(high, (0, high.numel() % 2)).chunk(2)
        high = a + b
        back = high - a
        lost = lost + ((a - (high - back)) + (b - back)).sum()
    whole = high.reshape(())
    return whole, torch.where(whole.isfinite(), lost, torch.zeros_like(lost))


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """The rounding error of ``a * b``: the exact product minus ``product``."""
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``x`` into the upper and the lower half of its bits; their sum is ``x``."""
    large = x * _SPLIT
    first = large - (large - x)
    return first, x - first


def _finite(x: Tensor) -> Tensor:
    """Replace what is not finite by 0: a correction cannot be computed for numbers that are infinite or very large."""
    return torch.where(x.isfinite(), x, torch.zeros_like(x))
