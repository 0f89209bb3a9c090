"""``fit plan --measure``: what this machine reaches, in the form that ``--device`` and ``--network`` take."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from engine.cli.exits import OK, UsageError
from engine.cli.main import table
from engine.cli.reporting import reported
from engine.cli.run_actions import log_to_terminal
from engine.config.settings import Settings
from engine.distributed.environment import detect
from engine.launch.local_ranks import crew
from engine.planning.device_table import Link
from engine.planning.measurement import Measured, measured
from engine.planning.plan_text import count, duration, size
from engine.utils import accelerator


def measure(processes: int | None, as_json: bool) -> int:
    """Measure on so many ranks of this machine, or on those that a launcher has started; returns the exit status."""
    return reported(lambda: _measure(processes, as_json))


def _measure(processes: int | None, as_json: bool) -> int:
    if processes is not None and processes < 1:
        raise UsageError(f"--processes {processes}: give at least 1")
    log_to_terminal()
    with crew(_settings(processes)) as group:
        found = measured(group)
        if group.is_main:
            print(
                json.dumps({**asdict(found), "as_device": found.as_device, "as_network": found.as_network})
                if as_json
                else _text(found)
            )
        group.barrier()
    return OK


def _settings(processes: int | None) -> Settings:
    there = detect(os.environ).world_size
    if there > 1:  # started by a launcher, or by this command's first process
        if processes not in (None, there):
            raise UsageError(f"--processes {processes}: a launcher has started {there} ranks already; leave it out")
        return Settings(strategy="ddp")
    kind = accelerator.device_type("auto")
    usual = accelerator.devices(kind) if kind != "cpu" else 2
    ranks = usual if processes is None else processes
    return Settings(strategy="ddp" if ranks > 1 else "single", devices=ranks)


def _text(found: Measured) -> str:
    rows = [
        (f"{found.ranks} rank(s) at once on", found.device),
        ("memory of a rank", size(found.memory)),
        *((f"products in {name}", f"{count(value)} operations/s") for name, value in found.peaks.items()),
        ("memory traffic", f"{size(found.bandwidth)}/s"),
        ("start of an operation", duration(found.dispatch)),
        *([("a DTensor's besides", duration(found.dtensor))] if found.dtensor is not None else []),
        *(
            row
            for name, link in (("within a node", found.within), ("between nodes", found.between))
            if link
            for row in _link(name, link)
        ),
    ]
    lines = [*table(rows), "", "for a plan:", f"  --device {found.as_device}"]
    if found.as_network is not None:
        lines.append(f"  --network {found.as_network}")
    return "\n".join(lines)


def _link(name: str, link: Link) -> list[tuple[str, str]]:
    rows = {"all_reduce": (link.bandwidth, link.latency), **link.kinds}
    return [
        (f"{kind} {name}", f"{size(rate)}/s, {duration(latency)} a step of a ring")
        for kind, (rate, latency) in rows.items()
    ]
