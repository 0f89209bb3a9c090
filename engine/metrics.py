"""Logged values: kept on their device as they come, reduced over micro-batches and ranks when they are read."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group
from engine.errors import nearest
from engine.tree import batch_size as samples
from engine.tree import whole

REDUCTIONS = ("mean", "sum", "min", "max")
_FOLD = 256
"""Values kept before they are folded into one: bounds memory, and costs 1/256 of a fold for each value."""


Column = tuple[str, list[Any], list[Any]]
"""Values and weights that one reduction makes a number of."""


def on_host(items: list[Any]) -> list[float]:
    """Numbers and one-element tensors as floats: one copy for each device and dtype, however many tensors there are."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            groups.setdefault((item.device, item.dtype), []).append(index)
    found = list(items)
    for (device, _), indices in groups.items():
        if device.type == "cpu" and len(indices) <= 8:  # reading them one by one is quicker than three more operations
            for index in indices:
                found[index] = items[index].item()
            continue
        column = torch.stack([items[i] if not items[i].ndim else items[i].reshape(()) for i in indices])
        for index, value in zip(indices, column.double().tolist(), strict=True):
            found[index] = value
    return list(map(float, found))


class Slot:
    """All values of one name: those of the current step, and those of the epoch."""

    __slots__ = (
        "given", "metric", "name", "on_epoch", "on_step", "options", "reduce", "total",
        "values", "weight", "weights", "window", "window_values", "window_weights",
    )  # fmt: skip

    def __init__(self, name: str, options: tuple[bool, bool, bool, str]) -> None:
        self.name, self.options, self.reduce = name, options, options[3]
        self.on_step, self.on_epoch = options[:2]
        self.given: Any = None
        """The options as the newest call gave them: the usual call is recognised by one comparison."""
        self.metric: Any = None
        self.window = -1
        self.window_values: list[Any] = []
        self.window_weights: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Forget the epoch."""
        self.values: list[Any] = []
        self.weights: list[Any] = []
        self.total: Any = None
        self.weight: Any = 0.0

    def fold(self) -> None:
        """Reduce the epoch's values so far to one pair (value, weight), on the device."""
        if self.values:
            total, weight = reduced(self.values, self.weights, self.reduce)
            if self.total is not None:
                totals, weights = [self.total, total], [self.weight, weight]
                if self.reduce == "mean":  # totals are weighted sums already
                    total, weight = self.total + total, self.weight + weight
                else:
                    total, weight = reduced(totals, [1.0, 1.0], self.reduce)[0], weights[0] + weights[1]
            self.total, self.weight = total, weight
            self.values, self.weights = [], []

    def column(self) -> Column:
        """The epoch so far, still to be reduced."""
        if self.total is None:
            return self.reduce, self.values, self.weights
        self.fold()
        if self.reduce != "mean":
            return self.reduce, [self.total], [self.weight]
        return "mean", [self.total / (self.weight if isinstance(self.weight, Tensor) else self.weight or 1.0)], [self.weight]


def reduced(values: list[Any], weights: list[Any], reduce: str) -> tuple[Any, Any]:
    """``(sum of value * weight, sum of weights)`` for ``"mean"``, else ``(reduced value, number of values)``; float64, no wait for a device."""
    plain = not any(isinstance(v, Tensor) for v in values)
    if plain and not any(isinstance(w, Tensor) for w in weights):
        if reduce == "mean":
            return _sum([v * w for v, w in zip(values, weights, strict=True)]), math.fsum(weights)
        return (_sum(values) if reduce == "sum" else min(values) if reduce == "min" else max(values)), float(len(values))
    device = next(t.device for t in (*values, *weights) if isinstance(t, Tensor))
    stacked = _column(values, device)
    if reduce != "mean":
        return getattr(torch, {"sum": "sum", "min": "amin", "max": "amax"}[reduce])(stacked), float(len(values))
    if not any(isinstance(w, Tensor) for w in weights) and len(set(weights)) == 1:
        return stacked.sum() * weights[0], float(sum(weights))
    column = _column(weights, device)
    return (stacked * column).sum(), column.sum()


def _column(items: list[Any], device: torch.device) -> Tensor:
    if all(isinstance(item, Tensor) for item in items):
        return torch.stack([item.reshape(()).to(torch.float64) if item.dtype != torch.float64 or item.ndim else item for item in items]).to(device)
    floats = [float(i) if not isinstance(i, Tensor) else 0.0 for i in items]
    column = torch.tensor(floats, dtype=torch.float64).to(device, non_blocking=True)
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            column[index] = item.reshape(()).to(device, torch.float64, non_blocking=True)
    return column


class Recorder:
    """What ``self.log`` writes to: one for training, one for each loader of an evaluation."""

    def __init__(
        self, group: Group, *, on_step: bool, on_epoch: bool, suffix: str = "", data_group: Group | None = None, speaks: bool = True
    ) -> None:
        self.group, self.suffix, self.speaks = group, suffix, speaks
        """Values are reduced over all of ``group``; those of a rank that does not speak are left out: another one saw the same data."""
        self.data_group = data_group or group
        """The ranks over which torchmetrics objects are computed."""
        self.on_step, self.on_epoch = on_step, on_epoch
        """What holds for a name that says nothing about it."""
        self.slots: dict[str, Slot] = {}
        self.window = 0
        """Which step the values belong to."""
        self.size: int = 1
        """Samples in the current micro-batch: the weight of its values; 0: they do not count; -1: look at ``batch``."""
        self.batch: Any = None

    def record(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: str = "mean",
        batch_size: Any = None,
    ) -> None:
        """Keep one value. Nothing is computed on it and no device is waited for.

        Raises:
            TypeError: not a number, a one-element tensor or a torchmetrics object.
            ValueError: several elements, or a name that was logged with other options before.
        """
        given = (on_step, on_epoch, prog_bar, reduce)
        slot = self.slots.get(name)
        if slot is None or slot.given != given:
            slot = self._slot(name, given)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}: log one number, for example its .mean()")
            value = whole(value.detach())
        elif not isinstance(value, (int, float)):
            value = self._other(slot, value)
            if value is None:
                return
        if not self.size:
            return
        if batch_size is None:
            if self.size < 0:
                self.size = samples(self.batch) or 1
            batch_size = self.size
        if slot.on_step:
            if slot.window != self.window:
                slot.window, slot.window_values, slot.window_weights = self.window, [], []
            slot.window_values.append(value)
            slot.window_weights.append(batch_size)
        if slot.on_epoch:
            slot.values.append(value)
            slot.weights.append(batch_size)
            if len(slot.values) >= _FOLD:
                slot.fold()

    def _slot(self, name: str, given: tuple[bool | None, bool | None, bool, str]) -> Slot:
        """The slot of a name that is new, or whose options are given in another way than before."""
        if not isinstance(name, str):
            raise TypeError(f"log() takes a name (str) first, got {name!r}")
        on_step, on_epoch, prog_bar, reduce = given
        if reduce not in REDUCTIONS:
            raise ValueError(f"log({name!r}, reduce={reduce!r}) is unknown{nearest(reduce, REDUCTIONS)}; possible: {', '.join(REDUCTIONS)}")
        options = (self.on_step if on_step is None else on_step, self.on_epoch if on_epoch is None else on_epoch, prog_bar, reduce)
        slot = self.slots.get(name)
        if slot is None:
            slot = self.slots[name] = Slot(name, options)
        elif slot.options != options:
            names = ("on_step", "on_epoch", "prog_bar", "reduce")
            differ = [f"{n}={b!r} (before: {a!r})" for n, a, b in zip(names, slot.options, options, strict=True) if a != b]
            raise ValueError(f"log({name!r}) is called with other options than before: {', '.join(differ)}; give it one set, or another name")
        slot.given = given
        return slot

    def _other(self, slot: Slot, value: Any) -> Any:
        """A torchmetrics object (kept, read later: ``None``) or a number in disguise (numpy's)."""
        if callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None)):
            if callable(getattr(value, "items", None)):
                raise TypeError(f"log({slot.name!r}) got a MetricCollection: use log_dict(collection)")
            slot.metric, slot.window = value, self.window
            if self.data_group is not self.group:
                value.process_group = self.data_group.wide or self.data_group.cpu
                if self.data_group.cpu is None:
                    value.distributed_available_fn = _never
            return None
        if isinstance(value, Mapping):
            raise TypeError(f"log({slot.name!r}) got a dict: use log_dict, with one number under each name (no nested dicts)")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"log({slot.name!r}) got {type(value).__name__}: log a number, a tensor with one element or a torchmetrics Metric"
            ) from None

    # -- reading ----------------------------------------------------------------------------------------------------------------

    def step_values(self) -> dict[str, float]:
        """The newest step's values, over its micro-batches and all ranks. A collective; waits for the device once."""
        columns: dict[str, Column] = {}
        for slot in self.slots.values():
            if slot.options[0] and slot.window == self.window:
                name = f"{slot.name}_step" if slot.options[1] else slot.name
                if slot.metric is not None:
                    cache = getattr(slot.metric, "_forward_cache", None)
                    columns[name] = ("mean", [slot.metric.compute() if cache is None else cache], [1.0])
                else:
                    columns[name] = (slot.reduce, slot.window_values, slot.window_weights)
        return self._over_ranks(columns)

    def epoch_values(self, clear: bool = True) -> dict[str, float]:
        """The epoch's values over all micro-batches and ranks; then a new epoch begins. A collective; waits for the device once."""
        columns: dict[str, Column] = {}
        computed: dict[str, float] = {}
        for slot in self.slots.values():
            if not slot.options[1]:
                continue
            name = (f"{slot.name}_epoch" if slot.options[0] else slot.name) + self.suffix
            if slot.metric is not None:
                value = slot.metric.compute()  # torchmetrics reduces over the ranks by itself
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise ValueError(f"log({slot.name!r}): {type(slot.metric).__name__}.compute() gave {value!r:.100}, not one number")
                if self.data_group is self.group:
                    computed[name] = float(value)
                else:  # ranks that hold other parts of the model may not have seen it
                    columns[name] = ("mean", [float(value)], [1.0])
                if clear:
                    slot.metric.reset()
            else:
                columns[name] = slot.column()
            if clear:
                slot.clear()
        return {**self._over_ranks(columns), **computed}

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the epoch so far (of torchmetrics objects see :mod:`engine.metric_states`)."""
        state = {}
        for name, slot in self.slots.items():
            slot.fold()
            if slot.total is not None:
                state[name] = {"options": list(slot.options), "total": slot.total, "weight": slot.weight}
        return state

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Go on from :meth:`state_dict` of this rank, or of several that it stands for now."""
        for name, saved in ((name, saved) for state in states for name, saved in state.items()):
            slot = self.slots.get(name)
            if slot is None or slot.total is None:
                slot = self.slots[name] = Slot(name, tuple(saved["options"]))
                slot.total, slot.weight = saved["total"], saved["weight"]
            elif slot.reduce in ("mean", "sum"):
                slot.total, slot.weight = slot.total + saved["total"], slot.weight + saved["weight"]
            else:
                slot.total = reduced([slot.total, saved["total"]], [1.0, 1.0], slot.reduce)[0]
                slot.weight = slot.weight + saved["weight"]

    def restore_metric(self, name: str, metric: Any, options: tuple[Any, ...]) -> None:
        """Know a torchmetrics object under the name and the options that it was logged with before."""
        self._other(self.slots.setdefault(name, Slot(name, options)), metric)

    def progress_names(self) -> set[str]:
        """The names to show in a progress bar, in each of their forms."""
        names = [slot.name for slot in self.slots.values() if slot.options[2]]
        return {name + ending + self.suffix for name in names for ending in ("", "_step", "_epoch")} | set(names)

    def _over_ranks(self, columns: dict[str, Column]) -> dict[str, float]:
        floats = iter(on_host([item for _, values, weights in columns.values() for item in (*values, *weights)]))
        numbers: list[float] = []
        for op, values, weights in columns.values():
            values, weights = list(itertools.islice(floats, len(values))), list(itertools.islice(floats, len(weights)))
            if op == "mean":
                numbers += _sum([v * w for v, w in zip(values, weights, strict=True)]), _sum(weights)
            else:
                numbers += reduced(values, weights, op) if values else (0.0, 0.0)
        if not self.speaks:
            numbers[1::2] = [0.0] * (len(numbers) // 2)
        if self.group.world_size == 1:
            parts = zip(columns.items(), numbers[::2], numbers[1::2], strict=True)
            return {name: total / weight if op == "mean" else total for (name, (op, _, _)), total, weight in parts if weight}
        return combined(self._exchange(list(columns), [op for op, _, _ in columns.values()], numbers))

    def _exchange(self, names: list[str], ops: list[str], numbers: list[float]) -> list[tuple[list[str], list[str], list[float]]]:
        """Every rank's names and numbers. Ranks that log the same names, the usual case, exchange numbers only."""
        head = gather_row(self.group, torch.tensor([zlib.crc32(repr((names, ops)).encode())], dtype=torch.int64))
        if len(set(head.flatten().tolist())) == 1:
            if not names:
                return [(names, ops, [])]
            rows = gather_row(self.group, torch.tensor(numbers, dtype=torch.float64))
            return [(names, ops, row) for row in rows.tolist()]
        return gather_json(self.group, (names, ops, numbers))


def combined(every: list[tuple[list[str], list[str], list[float]]]) -> dict[str, float]:
    """One value for each name out of the ranks' (total, weight) pairs; a name without any weight is left out."""
    merged: dict[str, tuple[str, list[float], list[float]]] = {}
    for names, ops, numbers in every:
        for index, (name, op) in enumerate(zip(names, ops, strict=True)):
            if numbers[2 * index + 1]:
                _, totals, weights = merged.setdefault(name, (op, [], []))
                totals.append(numbers[2 * index])
                weights.append(numbers[2 * index + 1])
    how = {"mean": lambda t, w: _sum(t) / _sum(w), "sum": lambda t, w: _sum(t), "min": lambda t, w: min(t), "max": lambda t, w: max(t)}
    return {name: float(how[op](totals, weights)) for name, (op, totals, weights) in merged.items()}


def _never() -> bool:
    return False


def _sum(numbers: list[float]) -> float:
    if len(numbers) == 1:
        return numbers[0]
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)  # fsum refuses inf - inf
