"""The states of torchmetrics objects: saves and loads them, and merges those of several ranks, loaders or micro-batches."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from engine.utils.tree import map_tensors

Entry = tuple[Mapping[str, Any], int]
"""A metric's states by name, and the number of updates that they include."""


_OLDEST = (1, 4)
"""The oldest release of torchmetrics whose metrics have the states and counters that are read here."""


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics ``Metric``.

    Raises:
        RuntimeError: it is one of a torchmetrics that is too old.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # before torchmetrics is imported, no object can be a metric
    if torchmetrics is None or not isinstance(value, torchmetrics.Metric):
        return False
    _check_release(torchmetrics.__version__)
    return True


@cache
def _check_release(version: str) -> None:
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise RuntimeError(
            f"torchmetrics {version} is installed, and its metrics need at least {oldest} here; another package of this environment may pin it "
            f"(pip show torchmetrics lists under 'Required-by'): pip install 'torchmetrics>={oldest},<2'"
        )


def entry(metric: Any) -> Entry:
    """The states of ``metric``, without its submetrics'. Tensors are shared; lists are copied, because ``reset`` empties them in place."""
    return {
        name: [*value] if isinstance(value, list) else value.detach() for name, value in metric.metric_state.items()
    }, metric.update_count


def copied(state_and_updates: Entry) -> Entry:
    """Copy an entry with its tensors, because metrics change their states in place."""
    state, updates = state_and_updates
    return map_tensors(torch.clone, dict(state)), updates


def install(metric: Any, state: Mapping[str, Any], updates: int) -> None:
    """Set the states of ``metric``, and the number of updates that they include."""
    for name, value in state.items():
        setattr(metric, name, [*value] if isinstance(value, list) else value)
    metric._update_count, metric._computed = updates, None


def fresh(metric: Any) -> dict[str, Any]:
    """The states of ``metric`` before any update, on its device."""
    device = metric.device
    return {
        name: [] if isinstance(value, list) else value.detach().clone().to(device)
        for name, value in metric._defaults.items()
    }


def merged(metric: Any, entries: Sequence[Entry]) -> Entry | None:
    """Merge several entries with torchmetrics' reductions over ranks; ``None`` if no entry includes an update.

    Entries without an update are ignored. A mean is weighted by the number of updates. States without a reduction are stacked, ``[entries, ...]``.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    entries = [e for e in entries if e[1]]
    if len(entries) < 2:
        return entries[0] if entries else None
    updates = [count for _, count in entries]
    state: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        values = [states[name] for states, _ in entries]
        if isinstance(values[0], list):
            state[name] = [item for value in values for item in value]
        elif reduction is dim_zero_cat:
            state[name] = torch.cat(values)
        elif reduction is dim_zero_mean:
            state[name] = sum(value * count for value, count in zip(values, updates, strict=True)) / sum(updates)
        elif reduction is None:  # such a metric's compute() expects the states of all ranks
            state[name] = torch.stack(values)
        else:
            state[name] = reduction(torch.stack(values))
    return state, sum(updates)


def metric_states(module: nn.Module) -> dict[str, Any]:
    """The states and numbers of updates of the metrics in ``module``, by the metrics' names; metrics without updates are left out."""
    return {
        name: {"state": dict(m.metric_state), "updates": m.update_count}
        for name, m in _metrics(module)
        if m.update_count
    }


def load_metric_states(module: nn.Module, rows: Sequence[Mapping[str, Any]]) -> None:
    """Load the results of :func:`metric_states` of one or several ranks (``rows``).

    Raises:
        ValueError: the states of several ranks cannot be merged.
    """
    for name, metric in _metrics(module):
        metric.reset()
        add(name, metric, [(row[name]["state"], row[name]["updates"]) for row in rows if name in row])


def add(name: str, metric: Any, entries: Iterable[Entry]) -> None:
    """Merge the states in ``entries`` into ``metric``, which is called ``name`` in errors.

    Raises:
        ValueError: the states cannot be merged.
    """
    all_entries = [
        entry(metric),
        *((map_tensors(lambda t: t.to(metric.device), dict(state)), updates) for state, updates in entries),
    ]
    if sum(1 for _, updates in all_entries if updates) > 1 and not can_add(metric):
        raise ValueError(
            f"the states that {type(metric).__name__} ({name!r}) had on several ranks cannot be merged: resume with as many ranks as "
            "the checkpoint was saved with, or from a checkpoint of an epoch's end"
        )
    total = merged(metric, all_entries)
    if total is not None:
        install(metric, *total)


def can_add(metric: Any) -> bool:
    """Whether several states of a metric can be merged into one that the metric can continue to update."""
    return all(
        reduction is not None or isinstance(metric._defaults[name], list)
        for name, reduction in metric._reductions.items()
    )


def discards_updates() -> bool:
    """Whether a block of :func:`unchanged` is running, so that updates of metrics will be discarded."""
    return bool(_repeats)


_repeats: list[bool] = []
"""An item for each running block of :func:`unchanged`."""


@contextmanager
def unchanged(module: nn.Module, more_metrics: Iterable[Any] = ()) -> Iterator[None]:
    """After the block, undo its updates of the metrics of ``module`` and of ``more_metrics``: for a repeated micro-batch, which a rank computes only
    because the other ranks' passes have collectives."""
    metrics = {id(m): m for m in (*(m for _, m in _metrics(module)), *more_metrics)}.values()
    before = [(m, *copied(entry(m))) for m in metrics]
    _repeats.append(True)
    try:
        yield
    finally:
        _repeats.pop()
        for metric, state, count in before:
            install(metric, state, count)


def _metrics(module: nn.Module) -> list[tuple[str, Any]]:
    if "torchmetrics" not in sys.modules:
        return []
    return [(name, m) for name, m in module.named_modules() if is_metric(m)]
