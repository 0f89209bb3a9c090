"""Logged torchmetrics objects: what each has seen in a step, a loader and an epoch, and its value over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.json_tree import pack, unpack
from engine.distributed.collectives import gather, gather_json
from engine.distributed.group import Group
from engine.metrics.torchmetrics_states import (
    Entry,
    add,
    can_add,
    copied,
    entry,
    fresh,
    install,
    is_metric,
    merged,
    repeated,
)

Seen = list[list[Entry]]
"""Entries that make up the state of a metric, for each of its submetrics."""


class Logged:
    """A torchmetrics object that was logged."""

    def __init__(self, metric: Any, path: str | None) -> None:
        self.metric, self.path = metric, path
        """``path``: its name in the module; ``None`` when it is not in the module, and then only the ranks that log it know it."""
        self.parts: list[Any] = [m for m in metric.modules() if is_metric(m)] if isinstance(metric, nn.Module) else []
        """The metric and its parts: a composition ``a + b`` has no states itself."""
        self.aside: Seen = [[] for _ in self.parts]
        """States from earlier loaders of this evaluation."""
        self.watches: dict[int, Watch] = {}
        """By submetric with states: the object that separates steps; empty when no step's value is needed."""

    def watch(self, watcher: Callable[[Any], Watch]) -> None:
        """Separate steps from now on."""
        if not self.watches:
            self.watches = {id(part): watcher(part) for part in self.parts if part._defaults}

    def end_micro_batch(self) -> None:
        """End the updates of this micro-batch."""
        for watch in self.watches.values():
            watch.finish_update()

    def step(self, window: int) -> Seen | None:
        """States of the step ``window``; ``None`` if the metric has seen nothing in it."""
        self.end_micro_batch()
        entries = {
            part: watch.entries for part, watch in self.watches.items() if watch.window == window and watch.entries
        }
        return (
            [entries.get(id(part), []) if part._defaults else [entry(part)] for part in self.parts] if entries else None
        )

    def all(self) -> Seen:
        """States of everything since the metric's reset; of all loaders so far, once a loader has ended."""
        return self.aside if any(self.aside) else [[entry(part)] for part in self.parts]

    def set_aside(self) -> None:
        """Keep the states of a loader, and reset the metric for the next."""
        self.aside = [[entry(part)] for part in self.parts]
        self.metric.reset()

    def reset(self) -> None:
        """Discard everything."""
        self.metric.reset()
        self.aside = [[] for _ in self.parts]

    def value(self, name: str, seen: Seen) -> float:
        """``metric.compute()`` on what was seen, here and on other ranks; the metric is not changed.

        Raises:
            ValueError: the result is not one number.
        """
        before = [(part, entry(part), part._computed, part.distributed_available_fn) for part in self.parts]
        try:
            for part, entries in zip(self.parts, seen, strict=True):
                install(part, *(merged(part, entries) or (fresh(part), 0)))
                part.distributed_available_fn = _never
            value = self.metric.compute()
        finally:
            for part, state, computed, available in before:
                install(part, *state)
                part._computed, part.distributed_available_fn = computed, available
        if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise ValueError(
                f"log({name!r}): {type(self.metric).__name__}.compute() returned {value!r:.100}, not one number"
            )
        return float(value)


class Watch:
    """Records what one metric sees in each step, through its ``forward`` or ``update``."""

    def __init__(self, metric: Any, current_step: Callable[[], int], begins: bool) -> None:
        self.metric, self.current_step = metric, current_step
        """``current_step`` returns the number of the window that updates belong to."""
        self.window, self.entries = current_step(), [copied(entry(metric))] if begins else []
        self.update = metric.update
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        metric.update = self.updated  # copies and pickles of a metric make their own ``update``

    def updated(self, *args: Any, **kwargs: Any) -> None:
        """Call ``metric.update``, and keep the state of this micro-batch alone."""
        metric = self.metric
        if repeated():
            self.update(*args, **kwargs)
            return
        if metric._enable_grad:  # forward's pass over this micro-batch alone
            self.last = None
            self.update(*args, **kwargs)
            self._append_state()
            return
        self.finish_update()
        self.update(*args, **kwargs)
        self.last = args, kwargs

    def finish_update(self) -> None:
        """Compute the latest micro-batch's own state, unless ``forward`` has done that."""
        if self.last is None:
            return
        (args, kwargs), self.last = self.last, None
        metric = self.metric
        before, computed = entry(metric), metric._computed
        try:
            install(metric, fresh(metric), 0)
            self.update(*args, **kwargs)
            self._append_state()
        finally:
            install(metric, *before)
            metric._computed = computed

    def _append_state(self) -> None:
        window = self.current_step()
        if self.window != window:
            self.window, self.entries = window, []
        self.entries.append(entry(self.metric))

    def end(self) -> None:
        """Restore the metric."""
        self.metric.update = self.update


def leader(metric: Any, module: nn.Module | None) -> Any:
    """The metric whose ``update`` is called for ``metric``: in a ``MetricCollection`` one of those with equal states represents all."""
    for collection in module.modules() if module is not None else ():
        groups = getattr(collection, "compute_groups", None)
        if isinstance(groups, dict):
            names = {id(member): name for name, member in collection._modules.items()}
            for group in groups.values():
                if names.get(id(metric)) in group:
                    return collection._modules[group[0]]
    return metric


def check(name: str, metric: Any, group: Group, on_step: bool) -> None:
    """Refuse settings that a logged metric's value cannot honour.

    Raises:
        ValueError: a setting of the metric contradicts a value over all ranks, or a step's value cannot be separated.
        TypeError: a metric of another library on several ranks.
    """
    kind, parts = type(metric).__name__, [m for m in metric.modules() if is_metric(m)] if is_metric(metric) else []
    if on_step and (not parts or any(part._defaults and any(is_metric(m) for m in part.children()) for part in parts)):
        raise ValueError(
            f"log({name!r}): what {kind} sees in one step cannot be separated; give on_step=False, on_epoch=True, or log a number"
        )
    if group.world_size == 1:
        return
    if not parts:
        raise TypeError(
            f"log({name!r}) got {kind}, which is not a torchmetrics Metric: its value over all ranks is unknown; log a number"
        )
    for part in parts:
        refuse(f"log({name!r})", part, {"sync_on_compute": True, "dist_sync_on_step": False, "dist_sync_fn": None})
        if part.process_group not in (None, group.wide or group.cpu):
            raise ValueError(
                f"log({name!r}): {type(part).__name__} has its own process_group, but a logged value is over all ranks: leave it out"
            )


def joined(module: nn.Module, group: Group, data_group: Group) -> None:
    """Before a run: let the metrics of ``module`` compute over the ranks that see different data.

    Raises:
        ValueError: one would synchronise with the other ranks at each batch.
    """
    for name, metric in module.named_modules():
        if is_metric(metric) and group.world_size > 1:
            refuse(f"{type(module).__name__}.{name}", metric, {"dist_sync_on_step": False})
            limit(metric, group, data_group)


def limit(metric: Any, group: Group, data_group: Group) -> None:
    """Let ``metric`` count the data of ranks that hold parts of one model once: they see equal batches."""
    if data_group is not group and metric.process_group is None:
        metric.process_group = data_group.wide or data_group.cpu
        if data_group.cpu is None:
            metric.distributed_available_fn = _never


def refuse(who: str, metric: Any, neutral: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` when a setting of ``metric`` is not as ``neutral`` says."""
    for setting, value in neutral.items():
        if getattr(metric, setting) != value:
            raise ValueError(
                f"{who}: {type(metric).__name__}({setting}={getattr(metric, setting)!r}), but logged values are always over all ranks, and ranks may "
                f"have different numbers of batches: leave {setting} out"
            )


def put_back(logged_metrics: Iterable[Logged]) -> None:
    """After several loaders merge what each metric has seen for all of them. One whose states cannot be merged keeps the last loader's."""
    for logged in logged_metrics:
        for part, entries in zip(logged.parts, logged.aside, strict=True):
            if can_add(part):
                add("", part, [copied(saved) for saved in entries])


Offer = dict[str, list[Any]]
"""By name: the path of the metric in the module, the slot's name, the slot's options."""


def agree(group: Group, mine: Offer) -> tuple[Offer, dict[str, int]]:
    """All metrics that some rank has logged, and the first rank that knows each; a collective."""
    every: Offer = {}
    knows: dict[str, int] = {}
    for rank, offer in enumerate(gather_json(group, mine)):
        for name, description in offer.items():
            every.setdefault(name, description)
            knows.setdefault(name, 0 if description[0] is not None else rank)
    return every, knows


def exchange(group: Group, mine: Mapping[str, Seen]) -> dict[str, Seen]:
    """States of all ranks' metrics by name, in the order of ranks; a collective.

    States are sent in one tensor per dtype and device, over the backend of their device; a rank without any sends an empty one.
    """
    tree, tensors = pack(dict(mine))
    forms = {name: [str(t.dtype).removeprefix("torch."), t.device.type, list(t.shape)] for name, t in tensors.items()}
    every = gather_json(group, [tree, forms])
    kinds = sorted({(dtype, device) for _, shapes in every for dtype, device, _ in shapes.values()})
    flat = []
    for kind in kinds:
        parts = [tensors[name].reshape(-1) for name, (dtype, device, _) in forms.items() if (dtype, device) == kind]
        flat.append(
            torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, kind[0]), device=_device(kind[1], group))
        )
    columns = dict(zip(kinds, gather(group, flat), strict=True))
    result: dict[str, Seen] = {}
    for packed, shapes in every:
        filled = {}
        for name, (dtype, device, shape) in shapes.items():
            column = columns[dtype, device]
            size = math.prod(shape)
            filled[name], columns[dtype, device] = column[:size].view(shape), column[size:]
        for name, lists in unpack(packed, filled).items():
            into = result.setdefault(name, [[] for _ in lists])
            for part, entries in zip(into, lists, strict=True):
                part += entries
    return result


def _device(kind: str, group: Group) -> torch.device:
    return group.device if kind == group.device.type else torch.device(kind)


def _never() -> bool:
    return False
