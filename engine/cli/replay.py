"""``fit replay``: the options. The work needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

ACTIONS = "engine.cli.replay_actions"
"""The module that does it."""


def main(argv: Sequence[str]) -> int:
    """Run a step again and print what it showed; returns the exit status, as of :mod:`engine.cli.exits`."""
    arguments = parser().parse_args(list(argv))
    return int(importlib.import_module(ACTIONS).replay(arguments))


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(
        prog="fit replay",
        description="Run one step of an earlier training again, from its newest checkpoint before that step, and print the samples, the loss of each "
        "micro-batch, the norm of the gradients and the first number that is not finite. On as many ranks as the run had, every number is the "
        "same to the last bit. Nothing of the run changes.",
        epilog="A run of 'fit run' needs no target: model, data and settings are those of its checkpoint. A script can call Fit.replay.",
        allow_abbrev=False,
    )
    top.add_argument("run", metavar="RUN", help="the run's folder, or one of its checkpoints; a directory or a URL")
    top.add_argument("--step", type=int, required=True, metavar="N", help="the step's number, from 1")
    top.add_argument("--target", metavar="TARGET", help="the TrainModule, as of fit run, of a run that a script made")
    top.add_argument("--data", metavar="CLASS", help="its data, as of fit run")
    more = "settings that differ from the run's, and arguments, as of fit run"
    top.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=more)
    top.add_argument(
        "--detect-anomaly", action="store_true", help="let autograd name the operation whose gradient is not finite"
    )
    top.add_argument("--per-layer", action="store_true", help="print the norm of each parameter's gradient")
    top.add_argument("--json", action="store_true", help="print one JSON value")
    return top
