"""``fit plan``: the options. The work needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from engine.cli.terminal import STATUSES, Parser, UsageError

ACTIONS = "engine.cli.plan_actions"
"""The module that does it."""

_EPILOG = f"""\
TARGET, --data, --set and --config are those of fit run.

DEVICE: a name (h100, h200, b200, a100-80gb, mi300x, ..., cpu), or memory, floating
point operations a second and bytes a second of the memory: 80GiB,1e15,3e12. The
operations may be given by dtype, 80GiB,bf16=1e15,fp32=6e13,3e12, and a name may have
another memory: h100,96GB.
LINKS: bandwidths of one device in one direction, within and between nodes:
450GB/s,50GB/s. The latency of one step of a ring may follow: 450GB/s:2e-6.

{STATUSES}"""
_JOB = ("target", "data", "set", "config", "world_size", "nodes", "device", "network", "memory_limit")
_ONE = ("storage", "price", "page")
_BY_MODE = {
    "plan": {*_JOB, *_ONE, "json"},
    "search": {*_JOB, "seconds", "json", "search"},
    "measure": {"processes", "json", "measure"},
}
"""The options of one plan, of a search, and of a measurement."""
_NEEDS = {"seconds": "--search", "processes": "--measure"}
_WRONG = {
    "search": "--{} is of one plan: give it with the settings that --search has found",
    "measure": "--{} is not for --measure, which measures this machine: give its numbers to a plan with --device and --network",
}


def main(argv: Sequence[str]) -> int:
    """Forecast a run; returns the exit status, as of :mod:`engine.cli.terminal`."""
    top = parser()
    arguments = top.parse_args(list(argv))
    if arguments.help and not any((arguments.target, arguments.config, arguments.data)):
        top.print_help()
        return 0
    for text in arguments.set:
        if "=" not in text:
            raise UsageError(
                f"--set {text}: give NAME=VALUE, as in strategy=fsdp or model.hidden=64; the target comes before the options"
            )
    _check_mode(arguments)
    if arguments.measure:
        return int(importlib.import_module(ACTIONS).measure(arguments.processes, arguments.json))
    if arguments.page is not None:
        _check_page(arguments.page)
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise UsageError(f"--seconds {arguments.seconds:g}: give more than 0")
    arguments.device = arguments.device or "h100"
    return int(importlib.import_module(ACTIONS).plan(arguments))


def _check_mode(arguments: argparse.Namespace) -> None:
    """Refuse options that what is asked for does not use."""
    mode = next((name for name in ("measure", "search") if getattr(arguments, name)), "plan")
    for name, value in vars(arguments).items():
        if name in _BY_MODE[mode] or name == "help" or value in (None, False, []):
            continue
        option = name.replace("_", "-")
        if name == "target":
            raise UsageError(f"--measure takes no target, got {value!r}: it measures this machine")
        if mode == "plan":
            raise UsageError(f"--{option} needs {_NEEDS[name]}")
        raise UsageError(_WRONG[mode].format(option))


def _check_page(name: str) -> None:
    """A plan may take minutes: a page that cannot be written is refused before it."""
    if not name.endswith(".html"):
        raise UsageError(f"--page {name}: the page needs a name that ends in .html")
    page = Path(name)
    folder = next(each for each in page.absolute().parents if each.exists())
    if page.is_dir():
        raise UsageError(f"--page {name}: this is a folder; name a file")
    if not folder.is_dir():
        raise UsageError(f"--page {name}: {folder} is not a folder")
    if not os.access(page if page.exists() else folder, os.W_OK):
        raise UsageError(f"--page {name}: no permission to write there")


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = Parser(
        prog="fit plan",
        description="Forecast a training on many ranks: the memory of a rank, what it sends, the time of a step,\n"
        "and whether it fits. The real strategy and optimizer run one step on this machine, in one\n"
        "process, on tensors without values. Nothing is trained, and no checkpoint or log is written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    _add_job(top)
    one = top.add_argument_group("one plan")
    rate = "bytes a second at which all ranks together write a checkpoint: 5GB/s"
    one.add_argument("--storage", metavar="RATE", help=rate)
    one.add_argument("--price", type=float, metavar="MONEY", help="of one device for one hour, in any currency")
    one.add_argument("--page", metavar="FILE", help="also write an HTML page with a timeline of the memory")
    many = top.add_argument_group("a search")
    searched = "try strategies, mesh degrees, micro-batches, recomputation and precisions: what fits, the fastest first, and why the rest does not"
    many.add_argument("--search", action="store_true", help=searched)
    many.add_argument("--seconds", type=float, metavar="S", help="start no further plan after S seconds")
    machine = top.add_argument_group("this machine")
    measured = "measure this machine's arithmetic, memory and links, and print them for --device and --network"
    machine.add_argument("--measure", action="store_true", help=measured)
    ranks = "ranks between which links are measured (default: one for each device, or 2)"
    machine.add_argument("--processes", type=int, metavar="N", help=ranks)
    return top


def _add_job(top: argparse.ArgumentParser) -> None:
    """What is planned, and where."""
    top.add_argument("target", nargs="?", metavar="TARGET", help="the TrainModule")
    about = "print this; with a target, the parameters of its classes"
    top.add_argument("-h", "--help", action="store_true", help=about)
    top.add_argument("--data", metavar="CLASS", help="its data: the first micro-batch gives the shapes")
    more = "settings of Fit, model.* and data.*: strategy=fsdp, strategy.tp=8, precision=bf16-mixed, data.batch_size=4"
    top.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=more)
    file = "the file of settings (default: $FIT_CONFIG, then ./fit.yaml if there is one)"
    top.add_argument("--config", metavar="FILE", help=file)
    top.add_argument("--json", action="store_true", help="print one JSON object")
    where = top.add_argument_group("the cluster")
    ranks = "processes of the job, one device each (default: devices x num_nodes of the settings)"
    where.add_argument("--world-size", type=int, metavar="N", help=ranks)
    where.add_argument("--nodes", type=int, metavar="M", help="machines (default: as few as hold the devices)")
    where.add_argument("--device", metavar="DEVICE", help="of each rank, see below (default: h100)")
    usual = "between devices, see below (default: the usual ones of the device)"
    where.add_argument("--network", metavar="LINKS", help=usual)
    limit = "memory that a rank may use: 2GiB (default: what the device has)"
    where.add_argument("--memory-limit", metavar="SIZE", help=limit)
