"""What torchmetrics objects of a module have gathered so far: taken, put back, and put together from several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.tree import map_tensors


def metric_states(module: nn.Module) -> dict[str, Any]:
    """By the metrics' names in ``module``; those that have seen nothing are left out."""
    return {name: {"state": dict(m.metric_state), "updates": m.update_count} for name, m in _metrics(module) if m.update_count}


def load_metric_states(module: nn.Module, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put back what :func:`metric_states` gave on one or several ranks.

    Raises:
        ValueError: states of several ranks that cannot be put together.
    """
    for name, metric in _metrics(module):
        metric.reset()
        for row in rows:
            if name in row:
                _add(name, metric, row[name])


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Whatever metrics see in the block is forgotten: a repeated micro-batch that only keeps the ranks matched."""
    # Copied: metrics add to their states in place.
    before = [(m, map_tensors(torch.clone, dict(m.metric_state)), m.update_count) for _, m in _metrics(module)]
    try:
        yield
    finally:
        for metric, state, count in before:
            for key, value in state.items():
                setattr(metric, key, value)
            metric._update_count, metric._computed = count, None


def logged_metrics(module: nn.Module, slots: Mapping[str, Any]) -> dict[str, Any]:
    """Which metrics of ``module`` were logged under which names, with their options."""
    names = {id(metric): name for name, metric in _metrics(module)}
    return {name: {"metric": names[id(s.metric)], "options": list(s.options)} for name, s in slots.items() if id(s.metric) in names}


def load_logged_metrics(module: nn.Module, saved: Mapping[str, Any], log: Callable[[str, Any, tuple[Any, ...]], None]) -> None:
    """Log again what :func:`logged_metrics` found: an epoch that is resumed at its very end logs nothing more, and still has values."""
    metrics = dict(_metrics(module))
    for name, entry in saved.items():
        if entry["metric"] in metrics:
            log(name, metrics[entry["metric"]], tuple(entry["options"]))


def _add(name: str, metric: Any, row: Mapping[str, Any]) -> None:
    device = metric.device
    state = map_tensors(lambda tensor: tensor.to(device), row["state"])
    if metric.update_count:
        _merge(name, metric, state, row["updates"])
    else:
        for key, value in state.items():
            setattr(metric, key, value)
    metric._update_count += row["updates"]
    metric._computed = None


def _merge(name: str, metric: Any, state: Mapping[str, Any], updates: int) -> None:
    """Add another rank's state, by the rules by which torchmetrics reduces states over ranks."""
    from torchmetrics.utilities import dim_zero_mean

    for key, reduction in metric._reductions.items():
        here, there = getattr(metric, key), state[key]
        if isinstance(here, list):
            merged: Any = [*here, *there]
        elif reduction is dim_zero_mean:
            merged = (here * metric.update_count + there * updates) / (metric.update_count + updates)
        elif reduction is None:  # compute() wants to see every rank's own
            raise ValueError(
                f"the states that {type(metric).__name__} ({name!r}) had on several ranks cannot be put together: resume with as many ranks as have "
                "saved, or from a checkpoint of an epoch's end"
            )
        else:
            merged = reduction(torch.stack([here, there]))
        setattr(metric, key, merged)


def _metrics(module: nn.Module) -> list[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")  # without it there are none
    if torchmetrics is None:
        return []
    return [(name, m) for name, m in module.named_modules() if isinstance(m, torchmetrics.Metric)]
