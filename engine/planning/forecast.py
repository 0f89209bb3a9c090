"""Plans a user's run, and searches over its plans: :meth:`engine.Fit.plan` and :meth:`engine.Fit.search_plans`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any

from engine import strategies
from engine.config.duration import parse
from engine.config.resolve import Resolved
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.distributed.group import DeviceKind
from engine.module import TrainModule
from engine.planning import candidates
from engine.planning.candidates import (
    RECOMPUTE,
    Candidate,
    Layout,
    UsersStrategy,
    has_blocks,
    layouts,
    layouts_with,
    users_strategy,
)
from engine.planning.devices import Cluster, Hardware, cluster_of, rate
from engine.planning.job import JobFacts, sequence_of
from engine.planning.plan import Plan
from engine.planning.search import Planner, PlanSearch, Space, Tried, resized, search
from engine.planning.simulated_group import CPU
from engine.planning.simulated_run import SimulatedJob, first_batch, simulated_run
from engine.planning.tracing import trace
from engine.utils.log import logger

_ORIGIN = "the search"
"""The origin of a setting that a search has chosen."""
_FIXED = ("precision", "activation_checkpointing")
"""Settings that a search varies only if the user has not given them."""
_NOT_VARIED = "not varied: compilation, clipping, optimizers, sequence and loss parallel, a pipeline's schedule and number of parts"


def plan(
    resolved: Resolved,
    module: TrainModule | Callable[[], TrainModule],
    train_loader: Any,
    datamodule: DataModule | None,
    *,
    world_size: int,
    nodes: int | None,
    device: str | Hardware,
    network: str | None,
    memory_limit: int | str | None,
    price: float | None,
    storage: float | str | None,
) -> Plan:
    """Plan a run with the settings in ``resolved``; the other arguments are those of :meth:`engine.Fit.plan`."""
    cluster = cluster_of(world_size, nodes, device, network, memory_limit)
    price, bandwidth = checked_costs(price, storage)
    facts = JobFacts()
    kind = DeviceKind("cuda", "float8" in cluster.device.peaks) if cluster.device.caching else CPU
    job = SimulatedJob(resolved, module, train_loader, datamodule, cluster.world_size, cluster.nodes, kind)
    traces = trace(job, facts)
    return Plan(tuple(traces), facts.job(cluster.world_size, cluster.nodes), cluster.device, price, bandwidth)


def checked_costs(price: float | None, storage: float | str | None) -> tuple[float | None, float | None]:
    """Check the price of one device for one hour, and return it with the bytes a second of storage.

    Raises:
        ValueError: one of them is not a number above 0 (a price may be 0).
    """
    if price is not None and not (isinstance(price, (int, float)) and isfinite(price) and price >= 0):
        raise ValueError(f"price={price!r}: give what one device costs for one hour, at least 0")
    return price, None if storage is None else rate(storage, "storage")


def search_plans(
    resolved: Resolved,
    module: TrainModule | Callable[[], TrainModule],
    train_loader: Any,
    datamodule: DataModule | None,
    *,
    world_size: int,
    nodes: int | None,
    device: str | Hardware,
    network: str | None,
    memory_limit: int | str | None,
    precisions: Sequence[Any] = (),
    largest: int | None = None,
    seconds: float | None = None,
    first: bool = False,
    report: Callable[[Tried], None] = lambda tried: None,
) -> PlanSearch:
    """Plan candidates of how to train ``module`` on ``world_size`` ranks, as :func:`engine.planning.search.search` does.

    Args:
        resolved: its settings apply, except those that the search varies.
        module, train_loader, datamodule: the run's module and data.
        world_size, nodes, device, network, memory_limit: the ranks and their hardware, as in :meth:`engine.Fit.plan`.
        precisions: the precisions to try; by default the one in the settings, or if these have none ``32-true`` and ``bf16-mixed`` (``16-mixed`` on
            GPUs without bf16).
        largest: the largest micro-batch to try.
        seconds: begin no further plan after this time.
        first: stop at the first candidate that fits; the simplest strategies and the least recomputation are tried first.
        report: called with each candidate once its verdict is known.

    Raises:
        RuntimeError, ValueError, TypeError: as :meth:`engine.Fit.plan`.
    """
    if seconds is not None and not (isinstance(seconds, (int, float)) and seconds >= 0):
        raise ValueError(f"seconds={seconds!r}: give after how many seconds no further plan begins, at least 0")
    cluster = cluster_of(world_size, nodes, device, network, memory_limit)
    job = SimulatedJob(resolved, module, train_loader, datamodule, cluster.world_size, cluster.nodes)
    chosen_strategy = users_strategy(
        resolved.settings.strategy, resolved.origins.get("strategy", "default"), cluster.world_size
    )
    batch, samples, all_layouts, has_blocks = _facts_of_one_rank(
        job, cluster, chosen_strategy is not None and chosen_strategy.brings_plan
    )
    data_ranks = cluster.world_size
    with _quiet():
        if chosen_strategy is not None:
            layout = _users_layout(chosen_strategy, job)
            all_layouts, data_ranks = layouts_with(layout, chosen_strategy, all_layouts), layout.data_ranks
        space = _space(
            resolved,
            chosen_strategy,
            all_layouts,
            has_blocks,
            cluster,
            batch,
            samples,
            data_ranks,
            precisions,
            largest,
            first,
        )
        return search(
            space,
            _planner(job, batch, samples, cluster),
            world_size=cluster.world_size,
            device=cluster.device.name,
            memory_bytes=cluster.device.memory,
            seconds=seconds,
            report=report,
        )


def _largest_step(settings: Settings, batch: Any) -> int:
    """The samples of the largest step that ``global_batch_size`` asks for; 0: it is not set."""
    setting = settings.global_batch_size
    sizes = setting.values() if isinstance(setting, dict) else [] if setting is None else [setting]
    length = sequence_of(batch) or 1
    return max((size if isinstance(size, int) else int(parse(size).value) // length for size in sizes), default=0)


def _space(
    resolved: Resolved,
    chosen_strategy: UsersStrategy | None,
    all_layouts: Sequence[Layout],
    has_blocks: bool,
    cluster: Cluster,
    batch: Any,
    samples: int,
    data_ranks: int,
    precisions: Sequence[Any],
    largest: int | None,
    first: bool,
) -> Space:
    """The candidates of the search; settings that the user has given are not varied."""
    settings = resolved.settings
    fixed = [name for name in _FIXED if resolved.origins.get(name, "default") != "default"]
    if "precision" in fixed and not precisions:
        precisions = [settings.precision]
    keeps_recompute = "activation_checkpointing" in fixed or not has_blocks
    return Space(
        layouts=all_layouts,
        precisions=candidates.precisions(settings.precision, cluster.device, precisions),
        recompute=(settings.activation_checkpointing,) if keeps_recompute else RECOMPUTE,
        global_batch=_largest_step(settings, batch) or samples * settings.accumulate_at(0) * data_ranks,
        micro_batch=samples,
        largest=largest,
        first=first,
        derived=settings.global_batch_size is not None,
        notes=[
            *(chosen_strategy.notes() if chosen_strategy else []),
            *(f"{name}={getattr(settings, name)} was given: no other is tried" for name in fixed),
            _NOT_VARIED,
        ],
    )


def _facts_of_one_rank(job: SimulatedJob, cluster: Cluster, planned: bool) -> tuple[Any, int, list[Layout], bool]:
    """A micro-batch, its samples, the layouts on the cluster, and whether the model has blocks, from a simulated run on one rank. ``planned``: see
    :func:`layouts`."""
    changes = {"strategy": "single", "accumulate_grad_batches": 1, "callbacks": ()}
    single_rank_job = replace(job, resolved=_with_changes(job.resolved, changes), world_size=1, nodes=1)
    with simulated_run(single_rank_job, 0, JobFacts()) as simulated:
        run, device = simulated.run, cluster.device
        assert run.train_loader is not None
        all_layouts = layouts(run.module, cluster.world_size, cluster.ranks_per_node, not device.is_host, planned)
        return *first_batch(run.train_loader), all_layouts, has_blocks(run.module)


def _users_layout(chosen_strategy: UsersStrategy, job: SimulatedJob) -> Layout:
    """The layout of the user's strategy on the job's ranks."""
    try:
        job_without_callbacks = replace(job, resolved=_with_changes(job.resolved, {"callbacks": ()}))
        with simulated_run(job_without_callbacks, 0, JobFacts()) as simulated:
            return chosen_strategy.layout(simulated.run.engine, job.world_size)
    except ValueError:  # the strategy refuses the job; the error of its plan will say why
        return chosen_strategy.layout(None, job.world_size)


def _planner(job: SimulatedJob, batch: Any, samples: int, cluster: Cluster) -> Planner:
    """A function that plans a candidate, with ``batch`` resized to the candidate's micro-batch."""

    def plan_of(candidate: Candidate) -> Plan:
        return plan(
            _with_changes(job.resolved, candidate.settings),
            job.module,
            [resized(batch, samples, candidate.micro_batch)],
            job.datamodule,
            world_size=cluster.world_size,
            nodes=cluster.nodes,
            device=cluster.device,
            network=None,
            memory_limit=None,
            price=None,
            storage=None,
        )

    return plan_of


def _with_changes(resolved: Resolved, changes: Mapping[str, Any]) -> Resolved:
    """The settings with ``changes``, checked by their strategy. ``global_batch_size`` is removed, because the window in ``changes`` keeps the global
    batch already; ``devices`` and ``num_nodes`` have their defaults, because the search has its own ranks."""
    changed = {**changes, "global_batch_size": None, "devices": "auto", "num_nodes": 1}
    settings = replace(resolved.settings, **changed)
    origins = {**resolved.origins, **dict.fromkeys(changed, _ORIGIN)}
    strategies.requested(settings, origins)
    return replace(resolved, settings=settings, origins=origins)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress logs and warnings inside the block: the user has not chosen the candidates."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
