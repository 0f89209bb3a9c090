"""``fit replay``: the options. The work needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from engine.cli.terminal import Parser

ACTIONS = "engine.cli.replay_actions"
"""The module that does it."""


def main(argv: Sequence[str]) -> int:
    """Run a step again and print what it showed; returns the exit status, as of :mod:`engine.cli.terminal`."""
    arguments = parser().parse_args(list(argv))
    return int(importlib.import_module(ACTIONS).replay(arguments))


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = Parser(
        prog="fit replay",
        description="Run one step of an earlier training again, from its newest checkpoint before that step, and print the samples, the loss of each "
        "micro-batch, the norm of the gradients and the first number that is not finite. On as many ranks as the run had, every number is the "
        "same to the last bit. Nothing of the run changes.",
        epilog="TARGET, --data, --callback, --set and --config are those of fit run; the sections model:, data: and callbacks: of a file of "
        "settings serve as well. Settings and parameters that are numbers and words are the run's where nothing else is given. What its "
        "checkpoint names as code is not imported. A script can call Fit.replay.",
        allow_abbrev=False,
    )
    top.add_argument("run", metavar="RUN", help="the run's folder, or one of its checkpoints; a directory or a URL")
    top.add_argument("--step", type=int, required=True, metavar="N", help="the step's number, from 1")
    top.add_argument("--target", metavar="TARGET", help="the TrainModule of the run")
    top.add_argument("--data", metavar="CLASS", help="its data")
    callback = "a callback of the run that changes a step; may be repeated"
    top.add_argument("--callback", action="append", default=[], metavar="CLASS", help=callback)
    file = "the file of settings (default: $FIT_CONFIG, then ./fit.yaml if there is one)"
    top.add_argument("--config", metavar="FILE", help=file)
    top.add_argument(
        "--run-recorded-code",
        action="store_true",
        help="import and call what the checkpoint names as model, data and callbacks: only for a run that you made yourself. Prints it first",
    )
    more = "settings of Fit, model.*, data.* and callbacks.*, where they differ from the run's"
    top.add_argument("--set", action="extend", nargs="+", default=[], metavar="NAME=VALUE", help=more)
    top.add_argument(
        "--detect-anomaly", action="store_true", help="let autograd name the operation whose gradient is not finite"
    )
    top.add_argument("--per-layer", action="store_true", help="print the norm of each parameter's gradient")
    top.add_argument("--json", action="store_true", help="print one JSON value")
    return top
