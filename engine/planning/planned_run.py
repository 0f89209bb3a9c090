"""The plan of a user's run: its traces, its facts, and the hardware."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.planning.devices import Cluster, rate
from engine.planning.job import JobFacts
from engine.planning.plan import Plan
from engine.planning.simulated_group import CPU, Target
from engine.planning.tracing import Start, trace


def planned(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    where: Cluster,
    *,
    price: float | None,
    storage: float | str | None,
) -> Plan:
    """The plan; arguments as of :meth:`engine.Fit.plan`, and ``start`` of a ``Fit``, as for :func:`engine.planning.tracing.trace`."""
    price, storage = costs(price, storage)
    facts = JobFacts()
    traces = trace(
        start,
        module,
        train_loader,
        world_size=where.world_size,
        nodes=where.nodes,
        datamodule=datamodule,
        facts=facts,
        target=Target("cuda", "float8" in where.device.peaks) if where.device.caching else CPU,
    )
    return Plan(tuple(traces), facts.job(where.world_size, where.nodes), where.device, price, storage)


def costs(price: float | None, storage: float | str | None) -> tuple[float | None, float | None]:
    """A price of one device for one hour, and bytes a second of storage.

    Raises:
        ValueError: one of them is not a number above 0 (a price may be 0).
    """
    if price is not None and not (isfinite(price) and price >= 0):
        raise ValueError(f"price={price}: give what one device costs for one hour, at least 0")
    return price, None if storage is None else rate(storage, "storage")
