"""``fit plan``: prints a plan, the result of a search, or the speeds of this machine (``--measure``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from engine.cli.class_paths import importable_here
from engine.cli.error_report import run_reporting_errors
from engine.cli.object_builder import ObjectBuilder, class_help
from engine.cli.requested_objects import Components, components_of
from engine.cli.run import log_to_terminal, prepare_objects
from engine.cli.terminal import DOES_NOT_FIT, OK, UsageError, show, table
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.distributed.environments import detect
from engine.launch.script_ranks import joined_group
from engine.planning.device_table import Link
from engine.planning.devices import cluster_of
from engine.planning.forecast import checked_costs
from engine.planning.measurement import MachineSpeeds, measure_machine
from engine.planning.plan import Plan
from engine.planning.plan_text import console, count, duration, show_plan, show_search, size
from engine.planning.search import PlanSearch, Tried
from engine.planning.simulated_run import NeedsValues
from engine.utils import accelerator
from engine.utils.log import logger
from engine.utils.text import terminal_text


def run(options: argparse.Namespace) -> int:
    """Forecast the run, or measure this machine; return the exit status (see :mod:`engine.cli.terminal`)."""
    return run_reporting_errors(
        lambda: _measure(options.processes, options.json) if options.measure else _plan(options)
    )


def _plan(options: argparse.Namespace) -> int:
    """Make the plan or the search, and print it."""
    importable_here()
    components = components_of(options.target, options.data, [], options.set, options.config)
    if options.help:
        show(class_help("plan", components.objects))
        return OK
    log_to_terminal()
    # Output of the target and its data must not mix with the lines of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        answer = planned(components, options)
    if isinstance(answer, PlanSearch):
        _print(answer.as_json(), show_search, options.json)
        return OK if answer.best else DOES_NOT_FIT
    _print(answer.as_json(), show_plan, options.json)
    if options.page is not None:
        _write_page(answer, options.page, quiet=options.json)
    return OK if answer.fits else DOES_NOT_FIT


def _print(values: dict[str, Any], show_table: Callable[[Any, Any], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=1))
    else:
        show_table(values, console())


def _write_page(plan: Plan, name: str, quiet: bool) -> None:
    try:
        plan.write_page(name)
    except OSError as error:
        raise UsageError(f"--page {name}: cannot be written: {error.strerror or error}") from None
    if not quiet:
        show(f"The page is {name}.")


def _report(tried: Tried) -> None:
    """Print a line for a finished plan of a search, each of which may take minutes."""
    if tried.plan is not None:
        print(terminal_text(f"{tried.candidate}: {tried.reason or tried.verdict}"), file=sys.stderr, flush=True)


def planned(components: Components, options: argparse.Namespace) -> Plan | PlanSearch:
    """The plan of the run that ``components`` describe, or the search for one, on the cluster that ``options`` describe."""
    world_size = options.world_size if options.world_size is not None else _ranks(components.resolved.settings)
    # Errors in the options come before the data is created, which may take long.
    cluster = cluster_of(world_size, options.nodes, options.device or "h100", options.network, options.memory_limit)
    price, storage = checked_costs(options.price, options.storage)
    fit, make_module, data = prepare_objects(components, [ObjectBuilder(component) for component in components.objects])
    datamodule, loader = (data, None) if isinstance(data, DataModule) else (None, data)
    job: dict[str, Any] = {
        "train_loader": loader,
        "datamodule": datamodule,
        "world_size": cluster.world_size,
        "nodes": cluster.nodes,
        "device": cluster.device,
    }
    forecast: Callable[[Any], Plan | PlanSearch] = (
        partial(fit.search_plans, **job, seconds=options.seconds, report=_report)
        if options.search
        else partial(fit.plan, **job, price=price, storage=storage)
    )

    try:
        return forecast(make_module)
    except NeedsValues as error:
        logger.info(f"{components.model.path} is made in memory, with all of its parameters: {error}")
        return forecast(make_module())


def _ranks(settings: Settings) -> int:
    if isinstance(settings.devices, int):
        return settings.devices * settings.num_nodes
    raise UsageError("for how many ranks? give --world-size N, or --set devices=8 num_nodes=2")


# -- this machine -------------------------------------------------------------------------------------------------------------------


def _measure(processes: int | None, as_json: bool) -> int:
    """Measure on ``processes`` ranks of this machine, or on the ranks that a launcher has started; print the speeds."""
    if processes is not None and processes < 1:
        raise UsageError(f"--processes {processes}: give at least 1")
    log_to_terminal()
    with joined_group(_settings_to_measure(processes)) as group:
        speeds = measure_machine(group)
        if group.is_main:
            print(
                json.dumps({**asdict(speeds), "as_device": speeds.as_device, "as_network": speeds.as_network})
                if as_json
                else _measured_text(speeds)
            )
        group.barrier()
    return OK


def _settings_to_measure(processes: int | None) -> Settings:
    """The settings with which :func:`joined_group` starts the ranks, or joins those that a launcher has started."""
    started_ranks = detect(os.environ).world_size
    if started_ranks > 1:  # started by a launcher, or by this command's first process
        if processes not in (None, started_ranks):
            raise UsageError(
                f"--processes {processes}: a launcher has started {started_ranks} ranks already; leave it out"
            )
        return Settings(strategy="ddp")
    kind = accelerator.device_type("auto")
    default_ranks = accelerator.devices(kind) if kind != "cpu" else 2
    ranks = default_ranks if processes is None else processes
    return Settings(strategy="ddp" if ranks > 1 else "single", devices=ranks)


def _measured_text(speeds: MachineSpeeds) -> str:
    """The speeds as a table, and the options for a plan with them."""
    rows = [
        (f"{speeds.ranks} rank(s) at once on", speeds.device),
        ("memory of a rank", size(speeds.memory)),
        *((f"products in {name}", f"{count(value)} operations/s") for name, value in speeds.peaks.items()),
        ("memory traffic", f"{size(speeds.bandwidth)}/s"),
        ("start of an operation", duration(speeds.dispatch)),
        *([("a DTensor's besides", duration(speeds.dtensor))] if speeds.dtensor is not None else []),
        *(
            row
            for name, link in (("within a node", speeds.within), ("between nodes", speeds.between))
            if link
            for row in _link_rows(name, link)
        ),
    ]
    lines = [*table(rows), "", "for a plan:", f"  --device {speeds.as_device}"]
    if speeds.as_network is not None:
        lines.append(f"  --network {speeds.as_network}")
    return "\n".join(lines)


def _link_rows(name: str, link: Link) -> list[tuple[str, str]]:
    rows = {"all_reduce": (link.bandwidth, link.latency), **link.kinds}
    return [
        (f"{kind} {name}", f"{size(rate)}/s, {duration(latency)} a step of a ring")
        for kind, (rate, latency) in rows.items()
    ]
