"""``fit plan``: the options. The work needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from engine.cli.exits import STATUSES, UsageError

ACTIONS = "engine.cli.plan_actions"
"""The module that does it."""
MEASURE = "engine.cli.plan_measure"
"""What ``--measure`` does."""

_DEVICES = """\
A device is a name (h100, h200, b200, a100-80gb, mi300x, ..., cpu), or memory, floating point operations a second and bytes a second of the
memory: 80GiB,1e15,3e12. Operations may be given by dtype, 80GiB,bf16=1e15,fp32=6e13,3e12, and a name may have another memory: h100,96GB.
A network is the bandwidth of one device, in one direction, within and between nodes: 450GB/s,50GB/s; a latency may follow: 450GB/s:2e-6."""


def main(argv: Sequence[str]) -> int:
    """Forecast a run; returns the exit status, as of :mod:`engine.cli.exits`."""
    top = parser()
    arguments = top.parse_args(list(argv))
    described = any((arguments.target, arguments.config, arguments.data))
    if arguments.help and not described:
        top.print_help()
        return 0
    for text in arguments.set:
        if "=" not in text:
            raise UsageError(
                f"--set {text}: give NAME=VALUE, as in strategy=fsdp or model.hidden=64; the target comes before the options"
            )
    if arguments.page is not None and not arguments.page.endswith(".html"):
        raise UsageError(f"--page {arguments.page}: the page needs a name that ends in .html")
    _check_search(arguments)
    if arguments.measure:
        if described:
            raise UsageError(
                "--measure measures this machine, and takes no target: give its numbers to a plan with --device and --network"
            )
        return int(importlib.import_module(MEASURE).measure(arguments.processes, arguments.json))
    return int(importlib.import_module(ACTIONS).plan(arguments))


def _check_search(arguments: argparse.Namespace) -> None:
    """Options that only a search has, and those that it does not."""
    if arguments.search:
        for name in ("page", "price", "storage"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} is of one plan: give it with the settings that --search has found")
    elif arguments.seconds is not None:
        raise UsageError(f"--seconds {arguments.seconds:g} limits a search: give --search too")


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(
        prog="fit plan",
        description="Forecast a training on many ranks: memory of a rank, what it sends, the time of a step, and whether it fits. "
        "The real strategy and optimizer run one step on this machine, in one process, on tensors without values; nothing is trained or written.",
        epilog=f"TARGET, --data, --set and --config are those of fit run.\n\n{_DEVICES}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    top.add_argument("target", nargs="?", metavar="TARGET", help="the TrainModule")
    top.add_argument(
        "-h", "--help", action="store_true", help="print this; with a target, the parameters of its classes"
    )
    top.add_argument("--data", metavar="CLASS", help="its data: the first micro-batch gives the shapes")
    more = "settings of Fit, model.* and data.*: strategy=fsdp, strategy.tp=8, precision=bf16-mixed, data.batch_size=4"
    top.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=more)
    top.add_argument(
        "--config", metavar="FILE", help="the file of settings (default: $FIT_CONFIG, then ./fit.yaml if there is one)"
    )
    ranks = "processes of the job, one device each (default: devices x num_nodes of the settings)"
    top.add_argument("--world-size", type=int, metavar="N", help=ranks)
    top.add_argument("--nodes", type=int, metavar="M", help="machines (default: as few as hold the devices)")
    top.add_argument("--device", default="h100", metavar="DEVICE", help="see below (default: h100)")
    top.add_argument("--network", metavar="LINKS", help="see below (default: the usual links of the device)")
    top.add_argument("--storage", metavar="RATE", help="what checkpoints are written with by all ranks together: 5GB/s")
    top.add_argument("--price", type=float, metavar="MONEY", help="of one device for one hour, in any currency")
    top.add_argument("--memory-limit", metavar="SIZE", help="that a rank may use: 2GiB (default: what the device has)")
    searched = "try strategies, mesh degrees, micro-batches, recomputation and precisions: what fits, the fastest first, and why the rest does not"
    top.add_argument("--search", action="store_true", help=searched)
    top.add_argument("--seconds", type=float, metavar="S", help="with --search: begin no further plan after so many")
    top.add_argument("--json", action="store_true", help="print one JSON object")
    top.add_argument("--page", metavar="FILE", help="also write an HTML page with a timeline of the memory")
    measured = "measure this machine's arithmetic, memory and links, and print them for --device and --network"
    top.add_argument("--measure", action="store_true", help=measured)
    top.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="with --measure: ranks between which links are measured (default: one for each device, or 2)",
    )
    return top
