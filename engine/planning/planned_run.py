"""The plan of a user's run: its traces, its facts, and the hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.planning.devices import Hardware, hardware, network
from engine.planning.job import Facts, machines_for
from engine.planning.plan import Plan
from engine.planning.tracing import Start, trace


def planned(
    start: Start,
    module: TrainModule | Callable[[], TrainModule],
    datamodule: DataModule | None,
    train_loader: Any,
    *,
    world_size: int,
    nodes: int | None,
    device: str | Hardware,
    links: str | None,
    price: float | None,
    storage: float | None,
) -> Plan:
    """The plan; arguments as of :meth:`engine.Fit.plan`, and ``start`` of a ``Fit``, as for :func:`engine.planning.tracing.trace`."""
    where = hardware(device) if links is None else network(links, hardware(device))
    machines = machines_for(world_size, nodes, where.per_node)
    facts = Facts()
    traces = trace(
        start,
        module,
        train_loader,
        world_size=world_size,
        nodes=machines,
        datamodule=datamodule,
        facts=facts,
        accelerated=where.caching,
    )
    return Plan(tuple(traces), facts.job(world_size, machines), where, price, storage)
