"""What ``fit plan`` does, once its options are valid."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.cli.building import Parsed
from engine.cli.components import Components, components_of
from engine.cli.describing import class_help
from engine.cli.exits import DOES_NOT_FIT, OK, UsageError
from engine.cli.reporting import reported
from engine.cli.run_actions import log_to_terminal, to_build
from engine.cli.targets import importable_here
from engine.config.settings import Settings
from engine.data.datamodule import DataModule
from engine.planning.devices import hardware, network, rate
from engine.planning.plan import Plan
from engine.planning.plan_table import show
from engine.planning.search import PlanSearch, Tried
from engine.planning.search_run import limited
from engine.planning.search_table import show as show_search
from engine.planning.tracing import NeedsValues
from engine.utils.log import logger


def plan(arguments: argparse.Namespace) -> int:
    """Forecast the run with the options of :func:`engine.cli.plan.parser`; returns the exit status."""
    return reported(lambda: _plan(arguments))


def _plan(arguments: argparse.Namespace) -> int:
    importable_here()
    wanted = components_of(arguments.target, arguments.data, [], arguments.set, arguments.config)
    if arguments.help:
        print(class_help("plan", wanted.objects))
        return OK
    log_to_terminal()
    # Output of the target and its data must not mix with the lines of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = planned(wanted, arguments)
    if isinstance(found, PlanSearch):
        return _show_search(found, arguments.json)
    if arguments.page is not None:
        found.write_page(arguments.page)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        from rich.console import Console

        show(found.as_json(), Console())
        if arguments.page is not None:
            print(f"The page is {arguments.page}.")
    return OK if found.fits else DOES_NOT_FIT


def _show_search(found: PlanSearch, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        from rich.console import Console

        show_search(found.as_json(), Console())
    return OK if found.best else DOES_NOT_FIT


def _report(tried: Tried) -> None:
    """A line for each plan of a search, which may take minutes."""
    if tried.plan is not None:
        print(f"{tried.candidate}: {tried.reason or tried.verdict}", file=sys.stderr, flush=True)


def planned(wanted: Components, arguments: argparse.Namespace) -> Plan | PlanSearch:
    """The plan of what ``wanted`` describes, on what the options ask for."""
    device = hardware(arguments.device)
    if arguments.network is not None:
        device = network(arguments.network, device)
    device = limited(device, arguments.memory_limit)
    storage = None if arguments.storage is None else rate(arguments.storage, "--storage")
    if arguments.price is not None and arguments.price < 0:
        raise UsageError(f"--price {arguments.price}: a price is not negative")
    world_size = arguments.world_size if arguments.world_size is not None else _ranks(wanted.resolved.settings)
    fit, make, data = to_build(wanted, [Parsed(component) for component in wanted.objects])
    datamodule, loader = (data, None) if isinstance(data, DataModule) else (None, data)
    job = {
        "train_loader": loader,
        "datamodule": datamodule,
        "world_size": world_size,
        "nodes": arguments.nodes,
        "device": device,
    }
    forecast: Callable[[Any], Plan | PlanSearch] = (
        partial(fit.search_plans, **job, seconds=arguments.seconds, report=_report)
        if arguments.search
        else partial(fit.plan, **job, price=arguments.price, storage=storage)
    )

    try:
        return forecast(make)
    except NeedsValues as error:
        logger.info(f"{wanted.model.path} is made in memory, with all of its parameters: {error}")
        return forecast(make())


def _ranks(settings: Settings) -> int:
    if isinstance(settings.devices, int):
        return settings.devices * settings.num_nodes
    raise UsageError("for how many ranks? give --world-size N, or --set devices=8 num_nodes=2")
