"""``fit env``: the options. The report needs torch, and is imported when they are valid."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from engine.cli.terminal import Parser

ACTIONS = "engine.cli.env_actions"
"""The module that does it."""


def main(argv: Sequence[str]) -> int:
    """Print what a run started here would find.

    Returns:
        0, or 1 when the settings or the environment would make a run fail. Wrong arguments end the process with status 2.
    """
    arguments = parser().parse_args(list(argv))
    return int(importlib.import_module(ACTIONS).run(arguments))


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = Parser(prog="fit env", description="Print versions, devices, environment, and each setting with its origin.")
    top.add_argument("--json", action="store_true", help="print one JSON object")
    return top
