"""``fit config``: the arguments. The actions are in a separate module, so that ``--help`` starts at once."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from engine.cli.terminal import Parser


def main(argv: Sequence[str]) -> int:
    """Write or check a file of settings.

    Returns:
        0, or 1 when a file that was checked is wrong.
    """
    arguments = parser().parse_args(list(argv))
    return int(importlib.import_module("engine.cli.config_actions").run(arguments))


def parser() -> argparse.ArgumentParser:
    """The arguments of ``fit config``."""
    top = Parser(
        prog="fit config",
        description="Write a commented file of settings, from answers to questions unless one of the first five options is given.",
    )
    ways = top.add_mutually_exclusive_group()
    ways.add_argument(
        "--default", action="store_true", help="without questions: every setting as a comment with its default"
    )
    ways.add_argument(
        "--from-accelerate",
        nargs="?",
        const="",
        metavar="PATH",
        help="convert Accelerate's configuration file (without PATH: the one that 'accelerate config' writes)",
    )
    ways.add_argument(
        "--from-training-args",
        metavar="FILE",
        help="convert transformers.TrainingArguments, a JSON or YAML file of them",
    )
    ways.add_argument(
        "--from-lightning",
        metavar="FILE",
        help="convert the 'trainer' of a YAML file, such as LightningCLI writes",
    )
    ways.add_argument("--check", metavar="PATH", help="write nothing: check a file of settings")
    top.add_argument("--output", default="fit.yaml", metavar="PATH", help="the file to write (default: fit.yaml)")
    top.add_argument(
        "--force",
        action="store_true",
        help="overwrite the file; with --from-..., write settings without a counterpart as comments instead of refusing them",
    )
    return top
