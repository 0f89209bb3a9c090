"""Logged torchmetrics objects: their states in a step, a loader and an epoch, and their values over all ranks."""

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
    discards_updates,
    entry,
    fresh,
    install,
    is_metric,
    merged,
)

Seen = list[list[Entry]]
"""For each part of a metric (itself and its submetrics), the entries that together are its state."""


class Logged:
    """A torchmetrics object that was logged."""

    def __init__(self, metric: Any, path: str | None) -> None:
        self.metric, self.path = metric, path
        """``path``: the metric's name in the module; ``None``: it is not in the module, so that only ranks that log it know it."""
        self.parts: list[Any] = [m for m in metric.modules() if is_metric(m)] if isinstance(metric, nn.Module) else []
        """The metric and its submetrics: a composition ``a + b`` has no states itself."""
        self.aside: Seen = [[] for _ in self.parts]
        """States from earlier loaders of this evaluation."""
        self.watches: dict[int, Watch] = {}
        """By id of each part with states, the object that separates its updates by step; empty if no step values are needed."""

    def watch(self, watcher: Callable[[Any], Watch]) -> None:
        """Separate updates by step from now on; ``watcher`` creates the object that does so for a part."""
        if not self.watches:
            self.watches = {id(part): watcher(part) for part in self.parts if part._defaults}

    def end_micro_batch(self) -> None:
        """Assign the updates so far to the current micro-batch."""
        for watch in self.watches.values():
            watch.finish_update()

    def step(self, window: int) -> Seen | None:
        """The states of the step ``window`` alone; ``None`` if the metric had no update in that step."""
        self.end_micro_batch()
        entries = {
            part: watch.entries for part, watch in self.watches.items() if watch.window == window and watch.entries
        }
        return (
            [entries.get(id(part), []) if part._defaults else [entry(part)] for part in self.parts] if entries else None
        )

    def all(self) -> Seen:
        """The states since the metric's reset, or those set aside at the end of a loader."""
        return self.aside if any(self.aside) else [[entry(part)] for part in self.parts]

    def set_aside(self) -> None:
        """Keep the states at the end of a loader, and reset the metric for the next loader."""
        self.aside = [[entry(part)] for part in self.parts]
        self.metric.reset()

    def reset(self) -> None:
        """Discard all states."""
        self.metric.reset()
        self.aside = [[] for _ in self.parts]

    def value(self, name: str, seen: Seen) -> float:
        """Return ``metric.compute()`` for the states ``seen`` on all ranks; the metric itself stays unchanged.

        Raises:
            ValueError: the result is not one number.
        """
        before = [(part, entry(part), part._computed, part.distributed_available_fn) for part in self.parts]
        try:
            for part, entries in zip(self.parts, seen, strict=True):
                install(part, *(merged(part, entries) or (fresh(part), 0)))
                part.distributed_available_fn = _no_other_ranks
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
    """Records the states of one metric by step, by replacing its ``update`` method, which its ``forward`` calls too."""

    def __init__(self, metric: Any, current_step: Callable[[], int], begins: bool) -> None:
        self.metric, self.current_step = metric, current_step
        """``current_step`` returns the index of the window that updates belong to."""
        # ``begins``: earlier updates of the metric belong to the current step.
        self.window, self.entries = current_step(), [copied(entry(metric))] if begins else []
        self.update = metric.update
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments of the latest ``update`` whose micro-batch's own state has not been computed."""
        metric.update = self.updated  # copies and pickles of a metric create their own ``update``

    def updated(self, *args: Any, **kwargs: Any) -> None:
        """Call ``metric.update``; record the state of this micro-batch alone, or keep the arguments to compute that state later."""
        metric = self.metric
        if discards_updates():
            self.update(*args, **kwargs)
            return
        if metric._enable_grad:  # the metric's forward computes the state of this micro-batch alone
            self.last = None
            self.update(*args, **kwargs)
            self._append_state()
            return
        self.finish_update()
        self.update(*args, **kwargs)
        self.last = args, kwargs

    def finish_update(self) -> None:
        """Compute the state of the latest micro-batch alone, unless ``forward`` has done that."""
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
        """Restore the metric's ``update`` method."""
        self.metric.update = self.update


def leader(metric: Any, module: nn.Module | None) -> Any:
    """The metric whose ``update`` is called for ``metric``: a ``MetricCollection`` updates only the first of several metrics with equal states."""
    for collection in module.modules() if module is not None else ():
        groups = getattr(collection, "compute_groups", None)
        if isinstance(groups, dict):
            names = {id(member): name for name, member in collection._modules.items()}
            for group in groups.values():
                if names.get(id(metric)) in group:
                    return collection._modules[group[0]]
    return metric


def check(name: str, metric: Any, group: Group, on_step: bool) -> None:
    """Refuse a metric whose settings do not go with logging.

    Raises:
        ValueError: a setting of the metric contradicts a value over all ranks, or updates cannot be separated by step (``on_step``).
        TypeError: it is a metric of another library, and there are several ranks.
    """
    kind, parts = type(metric).__name__, [m for m in metric.modules() if is_metric(m)] if is_metric(metric) else []
    if on_step and (not parts or any(part._defaults and any(is_metric(m) for m in part.children()) for part in parts)):
        raise ValueError(
            f"log({name!r}): the updates of {kind} cannot be separated by step; give on_step=False, on_epoch=True, or log a number"
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


def connect_metrics(module: nn.Module, group: Group, loss_group: Group) -> None:
    """Before a run, let the metrics of ``module`` compute over the ranks whose logged values count.

    Raises:
        ValueError: a metric would synchronise with the other ranks at each batch.
    """
    for name, metric in module.named_modules() if group.world_size > 1 else ():
        if is_metric(metric):
            refuse(f"{type(module).__name__}.{name}", metric, {"dist_sync_on_step": False})
            limit(metric, group, loss_group)


def limit(metric: Any, group: Group, loss_group: Group) -> None:
    """Let ``metric`` compute over ``loss_group`` only, so that values that several ranks have, because they hold parts of one model, count once."""
    if loss_group is not group and metric.process_group is None:
        metric.process_group = loss_group.wide or loss_group.cpu
        if loss_group.cpu is None:
            metric.distributed_available_fn = _no_other_ranks


def refuse(who: str, metric: Any, neutral: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a setting of ``metric`` differs from its value in ``neutral``; ``who``: the metric's name in the message."""
    for setting, value in neutral.items():
        if getattr(metric, setting) != value:
            raise ValueError(
                f"{who}: {type(metric).__name__}({setting}={getattr(metric, setting)!r}), but logged values are always over all ranks, and ranks may "
                f"have different numbers of batches: leave {setting} out"
            )


def put_back(logged_metrics: Iterable[Logged]) -> None:
    """Merge the states that each metric has set aside for several loaders. A metric whose states cannot be merged keeps those of the last loader."""
    for logged in logged_metrics:
        for part, entries in zip(logged.parts, logged.aside, strict=True):
            if can_add(part):
                add("", part, [copied(saved) for saved in entries])


Offer = dict[str, list[Any]]
"""By logged name, the metrics of a rank: their path in the module, the name of their slot, and the slot's options."""


def agree(group: Group, offer: Offer) -> tuple[Offer, dict[str, int]]:
    """Return the metrics that any rank has logged, and for each the first rank that has the metric; ``offer``: this rank's. A collective."""
    all_offers: Offer = {}
    first_ranks: dict[str, int] = {}
    for rank, offer_of_rank in enumerate(gather_json(group, offer)):
        for name, description in offer_of_rank.items():
            all_offers.setdefault(name, description)
            # All ranks have a metric of the module; one outside of it is known only to ranks that have logged it.
            first_ranks.setdefault(name, 0 if description[0] is not None else rank)
    return all_offers, first_ranks


def gather_states(group: Group, states: Mapping[str, Seen]) -> dict[str, Seen]:
    """Gather the states of metrics from all ranks: by name, in the order of ranks; ``states``: this rank's. A collective.

    States are sent in one tensor per dtype and device, over the backend of their device; a rank without any sends an empty tensor.
    """
    tree, tensors = pack(dict(states))
    forms = {name: [str(t.dtype).removeprefix("torch."), t.device.type, list(t.shape)] for name, t in tensors.items()}
    by_rank = gather_json(group, [tree, forms])
    kinds = sorted({(dtype, device) for _, shapes in by_rank for dtype, device, _ in shapes.values()})
    flat = []
    for kind in kinds:
        parts = [tensors[name].reshape(-1) for name, (dtype, device, _) in forms.items() if (dtype, device) == kind]
        flat.append(
            torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, kind[0]), device=_device(kind[1], group))
        )
    columns = dict(zip(kinds, gather(group, flat), strict=True))
    result: dict[str, Seen] = {}
    for packed, shapes in by_rank:
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


def _no_other_ranks() -> bool:
    """Tell torchmetrics that there are no other ranks to synchronise with."""
    return False
