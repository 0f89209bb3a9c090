"""Sums, means, minima and maxima of logged values: over micro-batches on the device, over ranks on the host."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.metrics import float32_pairs
from engine.metrics.log_options import Options
from engine.metrics.torchmetrics_states import Entry
from engine.metrics.torchmetrics_values import Logged
from engine.utils import accelerator

FOLD = 256
"""How many values are kept before they are reduced to one: this bounds memory, and costs 1/256 of a reduction per value."""


FEW = 8
"""Up to this many tensors on the CPU are read one by one, which is faster than stacking them first."""
Weighted = tuple[Any, Any]
"""A value and its weight."""
Column = tuple[str, list[Any], list[Any]]
"""A reduction, and the values and weights to reduce to one number."""


def as_floats(items: list[Any]) -> list[float]:
    """Convert numbers and one-element tensors to floats, with one copy from the device for each dtype, however many tensors there are."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            groups.setdefault((item.device, item.dtype), []).append(index)
    numbers = list(items)
    for (device, _), indices in groups.items():
        if device.type == "cpu" and len(indices) <= FEW:
            for index in indices:
                numbers[index] = items[index].item()
            continue
        column = torch.stack([items[i] if not items[i].ndim else items[i].reshape(()) for i in indices])
        for index, value in zip(indices, column.tolist(), strict=True):
            numbers[index] = value
    return list(map(float, numbers))


class Slot:
    """The values logged under one name: those of the current step, and those of the epoch."""

    __slots__ = (
        "arguments", "metric", "name", "on_epoch", "on_step", "options", "pending", "reduce", "silent", "total", "value_arguments",
        "values", "weight", "window", "window_values",
    )  # fmt: skip

    def __init__(self, name: str, options: Options, silent: bool = False) -> None:
        self.name, self.options, self.reduce = name, options, options.reduce_fx
        self.on_step, self.on_epoch = options.on_step, options.on_epoch
        self.silent = silent
        """Whether this rank's values are dropped, because the name is logged with ``rank_zero_only``."""
        self.arguments: Any = None
        """The options passed in the latest call of ``log``."""
        self.value_arguments: Any = None
        """The options passed in the latest call with a number, so that one comparison checks the next call. ``None`` for a torchmetrics object."""
        self.metric: Logged | None = None
        """The torchmetrics object that is logged under this name; the name has no values then."""
        self.pending: list[list[Entry]] = []
        """The state of a torchmetrics object from a checkpoint, until the object is logged again."""
        self.window = -1
        """The accumulation window that :attr:`window_values` belong to."""
        self.window_values: list[Weighted] = []
        self.clear()

    def clear(self) -> None:
        """Discard the epoch's values."""
        self.values: list[Weighted] = []
        self.total: Any = None
        self.weight: Any = 0.0

    def refuse(self, options: Options) -> None:
        """Raise a ``ValueError``: a call of ``log`` has other options than earlier calls."""
        pairs = zip(options._fields, self.options, options, strict=True)
        differ = [f"{name}={new!r} (before: {old!r})" for name, old, new in pairs if old != new]
        raise ValueError(
            f"log({self.name!r}) is called with other options than before: {', '.join(differ)}; give it one set, "
            "or another name"
        )

    def number(self, value: Any) -> float:
        """Convert a number of another library, such as NumPy's, to a float.

        Raises:
            TypeError: ``value`` is not a number.
        """
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"log({self.name!r}) got {type(value).__name__}: log a number, a tensor with one element "
                "or a torchmetrics Metric"
            ) from None

    def fold(self) -> None:
        """Reduce the epoch's values so far to one (value, weight) pair on the device; to a few such pairs if the device has no float64."""
        device_without_float64 = self.reduce in ("mean", "sum") and _device_without_float64(self.values)
        if device_without_float64:
            if self.total is not None:  # from a checkpoint
                # A mean's total is a weighted sum: it has weight 1 here, and a value of 0 has the rest of the weight.
                saved = [(self.total, 1.0), (0.0, self.weight - 1.0)] if self.reduce == "mean" else [(self.total, 1.0)]
                self.values, self.total, self.weight = [*saved, *self.values], None, 0.0
            self.values = float32_pairs.folded(*unzipped(self.values, self.name), self.reduce, device_without_float64)
        elif self.values:
            total, weight = reduced(*unzipped(self.values, self.name), self.reduce)
            if self.total is not None:
                if self.reduce == "mean":  # totals are weighted sums already
                    total, weight = self.total + total, self.weight + weight
                else:
                    # ``total`` first: it says on which device to reduce, while a checkpoint's total is on the CPU.
                    total, weight = reduced([total, self.total], [1.0, 1.0], self.reduce)[0], self.weight + weight
            self.total, self.weight = total, weight
            self.values = []

    def to_one_pair(self) -> None:
        """Reduce the epoch's values to exactly one (value, weight) pair. Waits for the device if that has no float64."""
        self.fold()
        if self.values:
            values, weights = (as_floats(items) for items in unzipped(self.values, self.name))
            self.total, self.weight = reduced(values, weights, self.reduce)
            self.values = []

    def column(self) -> Column:
        """The epoch's values so far, for the final reduction."""
        if self.total is None:
            return self.reduce, *unzipped(self.values, self.name)
        self.fold()
        if self.total is None:
            return self.reduce, *unzipped(self.values, self.name)
        if self.reduce != "mean":
            return self.reduce, [self.total], [self.weight]
        return (
            "mean",
            [self.total / (self.weight if isinstance(self.weight, Tensor) else self.weight or 1.0)],
            [self.weight],
        )


def unzipped(pairs: list[Weighted], name: str) -> tuple[list[Any], list[Any]]:
    """Split the pairs logged under ``name`` into values and weights.

    Raises:
        ValueError: a tensor was changed in place after it was logged, so that the logged value is lost.
    """
    for value, _ in pairs:
        # Recorder.record keeps only tensors of version 0, and clones others: a higher version means a later change.
        if isinstance(value, Tensor) and not value.is_inference() and value._version:
            raise ValueError(
                f"log({name!r}) got a tensor that was changed in place afterwards (as by `loss += penalty`): "
                "write `loss = loss + penalty`, or log a clone()"
            )
    return [value for value, _ in pairs], [weight for _, weight in pairs]


def reduced(values: list[Any], weights: list[Any], reduce: str) -> tuple[Any, Any]:
    """Return ``(sum of value * weight, sum of weights)`` for ``"mean"``, else ``(reduced value, number of values)``; in float64, without waiting for
    a device."""
    if not any(isinstance(item, Tensor) for item in (*values, *weights)):
        if reduce == "mean":
            return total_of([v * w for v, w in zip(values, weights, strict=True)]), math.fsum(weights)
        return (total_of(values) if reduce == "sum" else min(values) if reduce == "min" else max(values)), float(
            len(values)
        )
    device = next(t.device for t in (*values, *weights) if isinstance(t, Tensor))
    stacked = _column(values, device)
    if reduce != "mean":
        return getattr(torch, {"sum": "sum", "min": "amin", "max": "amax"}[reduce])(stacked), float(len(values))
    if not any(isinstance(w, Tensor) for w in weights) and len(set(weights)) == 1:
        return stacked.sum() * weights[0], float(sum(weights))
    column = _column(weights, device)
    return (stacked * column).sum(), column.sum()


def _device_without_float64(pairs: list[Weighted]) -> torch.device | None:
    """The device of the first value or weight that is on a device without float64; ``None``: there is none."""
    devices = (item.device for pair in pairs for item in pair if isinstance(item, Tensor) and item.device.type != "cpu")
    return next((device for device in devices if accelerator.wide(device) != torch.float64), None)


def _column(items: list[Any], device: torch.device) -> Tensor:
    """Stack the items to a column on the device, in float64 if the device has it. Otherwise float32 is enough for minima and maxima, while
    :mod:`engine.metrics.float32_pairs` computes sums and means."""
    wide = accelerator.wide(device)
    if all(isinstance(item, Tensor) for item in items):
        return torch.stack(
            [
                item.reshape(()).to(device, wide, non_blocking=True)
                if item.dtype != wide or item.ndim or item.device != device
                else item
                for item in items
            ]
        )
    floats = [float(i) if not isinstance(i, Tensor) else 0.0 for i in items]
    column = torch.tensor(floats, dtype=wide).to(device, non_blocking=True)
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            column[index] = item.reshape(()).to(device, wide, non_blocking=True)
    return column


def combined(rows: list[tuple[list[str], list[str], list[float]]]) -> dict[str, float]:
    """Reduce the ranks' rows to one value for each name; names without any weight are left out."""
    merged: dict[str, tuple[str, list[float], list[float]]] = {}
    for names, ops, numbers in rows:
        for index, (name, op) in enumerate(zip(names, ops, strict=True)):
            if numbers[2 * index + 1]:
                _, totals, weights = merged.setdefault(name, (op, [], []))
                totals.append(numbers[2 * index])
                weights.append(numbers[2 * index + 1])
    reductions = {
        "mean": lambda totals, weights: total_of(totals) / total_of(weights),
        "sum": lambda totals, weights: total_of(totals),
        "min": lambda totals, weights: min(totals),
        "max": lambda totals, weights: max(totals),
    }
    return {name: float(reductions[op](totals, weights)) for name, (op, totals, weights) in merged.items()}


def total_of(numbers: list[float]) -> float:
    """The sum, correctly rounded if all numbers are finite."""
    if len(numbers) == 1:
        return numbers[0]
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)  # fsum refuses inf - inf
