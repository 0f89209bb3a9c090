"""``fit report``: a page about runs, from what they left in their folders."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from engine.cli.terminal import FAILED, OK, Parser, UsageError, complain, show

CALLBACKS = "engine.callbacks"
"""The package that makes the page."""


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path.

    Returns:
        0, or 1 when it cannot be written. Wrong arguments, and folders without runs, end with status 2.
    """
    arguments = parser().parse_args(list(argv))
    if arguments.out is not None and not arguments.out.endswith(".html"):
        raise UsageError(f"--out {arguments.out}: the page needs a name that ends in .html")
    write_report = importlib.import_module(CALLBACKS).write_report
    try:
        path = write_report(arguments.folders, arguments.out, max_points=arguments.max_points)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(error) from None
    except OSError as error:
        complain(error)
        return FAILED
    show(path)
    return OK


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = Parser(
        prog="fit report",
        description="Write one HTML page about runs, which opens without network: curves, times, configuration, checkpoints, and the differences "
        "between runs. The runs had the callback Report or CSVLogger; they may have been killed, or still be running.",
    )
    top.add_argument(
        "folders", nargs="+", metavar="DIR", help="the folder of a run, or a root_dir, which stands for all of its runs"
    )
    top.add_argument(
        "--out",
        metavar="FILE",
        help="the page (default: report.html in the folder of a single run, comparison.html in the first DIR for several)",
    )
    top.add_argument(
        "--max-points",
        type=int,
        default=1_000_000,
        metavar="N",
        help="of all curves; beyond it, long curves keep their peaks only (default: 1000000)",
    )
    return top
