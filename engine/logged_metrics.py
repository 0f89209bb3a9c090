"""torchmetrics objects that are logged: what each has seen in a step, a loader and an epoch, and its value over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.collectives import gather, gather_json, gather_object
from engine.distributed.group import Group
from engine.metric_states import Entry, add, can_add, copied, entry, fresh, install, is_metric, merged, repeated
from engine.tree import map_tensors

Seen = list[list[Entry]]
"""What a metric has seen: for each of its parts the entries that make up its state."""


class Logged:
    """A torchmetrics object that was logged."""

    def __init__(self, metric: Any, path: str | None) -> None:
        self.metric, self.path = metric, path
        """``path``: its name in the module; ``None`` when it is not there, and then only the ranks that log it know it."""
        self.parts: list[Any] = [m for m in metric.modules() if is_metric(m)] if isinstance(metric, nn.Module) else []
        """It and the metrics that it is made of: a composition ``a + b`` has no states of its own."""
        self.aside: Seen = [[] for _ in self.parts]
        """What was seen for the loaders before."""
        self.watches: dict[int, Watch] = {}
        """By part: what tells the steps apart, for parts that have states; empty when nobody asked for a step's value."""

    def watch(self, watcher: Callable[[Any], Watch]) -> None:
        """From now on tell the steps apart."""
        if not self.watches:
            self.watches = {id(part): watcher(part) for part in self.parts if part._defaults}

    def settle(self) -> None:
        """The updates of this micro-batch are done."""
        for watch in self.watches.values():
            watch.settle()

    def step(self, window: int) -> Seen | None:
        """What it has seen in the step ``window``; ``None``: nothing."""
        self.settle()
        found = {part: watch.entries for part, watch in self.watches.items() if watch.window == window and watch.entries}
        return [found.get(id(part), []) if part._defaults else [entry(part)] for part in self.parts] if found else None

    def all(self) -> Seen:
        """What it has seen since it was reset, or set aside for another loader."""
        return self.aside if any(self.aside) else [[entry(part)] for part in self.parts]

    def set_aside(self) -> None:
        """Keep what was seen for a loader, and begin the next."""
        self.aside = [[entry(part)] for part in self.parts]
        self.metric.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.metric.reset()
        self.aside = [[] for _ in self.parts]

    def value(self, name: str, seen: Seen) -> float:
        """``metric.compute()`` on what was seen, here and on other ranks; the metric is as before afterwards.

        Raises:
            ValueError: that is not one number.
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
            raise ValueError(f"log({name!r}): {type(self.metric).__name__}.compute() gave {value!r:.100}, not one number")
        return float(value)


class Watch:
    """Takes down what one metric sees in each step, however its state goes on: by its own ``forward`` or ``update``."""

    def __init__(self, metric: Any, here: Callable[[], int], begins: bool) -> None:
        self.metric, self.here = metric, here
        """``here``: the step under way."""
        self.window, self.entries = here(), [copied(entry(metric))] if begins else []
        self.update = metric.update
        self.last: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        metric.update = self.updated  # copies and pickles of a metric make their own ``update``

    def updated(self, *args: Any, **kwargs: Any) -> None:
        """``metric.update``, and keep what came of this micro-batch alone."""
        metric = self.metric
        if repeated():
            self.update(*args, **kwargs)
            return
        if metric._enable_grad:  # forward's pass over this micro-batch alone
            self.last = None
            self.update(*args, **kwargs)
            self._keep()
            return
        self.settle()
        self.update(*args, **kwargs)
        self.last = args, kwargs

    def settle(self) -> None:
        """Look at the newest micro-batch alone, unless ``forward`` has done that."""
        if self.last is None:
            return
        (args, kwargs), self.last = self.last, None
        metric = self.metric
        before, computed = entry(metric), metric._computed
        try:
            install(metric, fresh(metric), 0)
            self.update(*args, **kwargs)
            self._keep()
        finally:
            install(metric, *before)
            metric._computed = computed

    def _keep(self) -> None:
        window = self.here()
        if self.window != window:
            self.window, self.entries = window, []
        self.entries.append(entry(self.metric))

    def end(self) -> None:
        """Leave the metric as it was."""
        self.metric.update = self.update


def leader(metric: Any, module: nn.Module | None) -> Any:
    """The metric whose ``update`` is called for ``metric``: in a ``MetricCollection`` one of those with equal states stands for all."""
    for collection in module.modules() if module is not None else ():
        groups = getattr(collection, "compute_groups", None)
        if isinstance(groups, dict):
            names = {id(member): name for name, member in collection._modules.items()}
            for group in groups.values():
                if names.get(id(metric)) in group:
                    return collection._modules[group[0]]
    return metric


def check(name: str, metric: Any, group: Group, on_step: bool) -> None:
    """Refuse what the value of a logged metric could not honour.

    Raises:
        ValueError: a setting of the metric that contradicts a value over all ranks; a step's value that cannot be told apart.
        TypeError: a metric of another library on several ranks.
    """
    kind, parts = type(metric).__name__, [m for m in metric.modules() if is_metric(m)] if is_metric(metric) else []
    if on_step and (not parts or any(part._defaults and any(is_metric(m) for m in part.children()) for part in parts)):
        raise ValueError(f"log({name!r}): what {kind} sees in one step cannot be told apart; give on_step=False, on_epoch=True, or log a number")
    if group.world_size == 1:
        return
    if not parts:
        raise TypeError(f"log({name!r}) got {kind}, which is not a torchmetrics Metric: its value over all ranks is not known; log a number")
    for part in parts:
        refuse(f"log({name!r})", part, {"sync_on_compute": True, "dist_sync_on_step": False, "dist_sync_fn": None})
        if part.process_group not in (None, group.wide or group.cpu):
            raise ValueError(f"log({name!r}): {type(part).__name__} has its own process_group, but a logged value is over all ranks: leave it out")


def joined(module: nn.Module, group: Group, data_group: Group) -> None:
    """Before a run: whatever the metrics of ``module`` compute themselves is over the ranks that see different data.

    Raises:
        ValueError: one would meet the other ranks at each batch.
    """
    for name, metric in module.named_modules():
        if is_metric(metric) and group.world_size > 1:
            refuse(f"{type(module).__name__}.{name}", metric, {"dist_sync_on_step": False})
            limit(metric, group, data_group)


def limit(metric: Any, group: Group, data_group: Group) -> None:
    """Ranks that hold parts of one model see the same data: it counts once."""
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


def put_back(every: Iterable[Logged]) -> None:
    """After several loaders each metric has seen all that was set aside. One whose states cannot be put together keeps the last loader's."""
    for logged in every:
        for part, entries in zip(logged.parts, logged.aside, strict=True):
            if can_add(part):
                add("", part, [copied(found) for found in entries])


Offer = dict[str, list[Any]]
"""By name: the path of the metric in the module, the slot's name, the slot's options."""


def agree(group: Group, mine: Offer) -> tuple[Offer, dict[str, int]]:
    """All metrics that some rank has logged, and the first rank that knows each; a collective."""
    every: Offer = {}
    knows: dict[str, int] = {}
    for rank, offer in enumerate(gather_json(group, mine)):
        for name, found in offer.items():
            every.setdefault(name, found)
            knows.setdefault(name, 0 if found[0] is not None else rank)
    return every, knows


def exchange(group: Group, mine: Mapping[str, Seen]) -> dict[str, Seen]:
    """What all ranks' metrics have seen, by name, in the order of ranks; a collective.

    States travel by dtype and device in one tensor each, on the channel of their device; a rank that has none sends an empty one.
    """
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(tensor.dtype, tensor.device.type, tuple(tensor.shape))

    every: list[dict[str, Seen]] = gather_object(group, {name: map_tensors(taken, seen) for name, seen in mine.items()})
    places: list[dict[tuple[str, str], list[_Place]]] = [{} for _ in every]
    for rank, seen in enumerate(every):
        _walk(seen, partial(_note, places[rank]))
    keys = sorted({key for found in places for key in found})
    flat = []
    for key in keys:
        own = [t.detach().reshape(-1) for t in tensors if (str(t.dtype), t.device.type) == key]
        flat.append(torch.cat(own) if own else _empty(key, places, group))
    columns = [iter(()) for _ in keys]
    for index, column in enumerate(gather(group, flat)):
        sizes = [place.size for found in places for place in found.get(keys[index], ())]
        columns[index] = iter(column.split(sizes))
    by_key = dict(zip(keys, columns, strict=True))
    result: dict[str, Seen] = {}
    for seen in every:
        filled = _walk(seen, lambda place: next(by_key[place.key]).view(place.shape))
        for name, lists in filled.items():
            into = result.setdefault(name, [[] for _ in lists])
            for part, entries in zip(into, lists, strict=True):
                part += entries
    return result


class _Place:
    """Where a tensor was."""

    def __init__(self, dtype: torch.dtype, device: str, shape: Sequence[int]) -> None:
        self.dtype, self.device, self.shape = dtype, device, tuple(shape)
        self.key, self.size = (str(dtype), device), torch.Size(shape).numel()


def _note(found: dict[tuple[str, str], list[_Place]], place: _Place) -> None:
    found.setdefault(place.key, []).append(place)


def _empty(key: tuple[str, str], places: list[dict[tuple[str, str], list[_Place]]], group: Group) -> Tensor:
    dtype = next(found[key][0].dtype for found in places if key in found)
    return torch.empty(0, dtype=dtype, device=group.device if key[1] == group.device.type else key[1])


def _walk(tree: Any, fn: Callable[[_Place], Any]) -> Any:
    """``tree`` with ``fn`` applied to each place."""
    if isinstance(tree, _Place):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: _walk(item, fn) for key, item in tree.items()}
    return type(tree)(_walk(item, fn) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _never() -> bool:
    return False
