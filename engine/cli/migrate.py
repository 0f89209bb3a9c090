"""``fit migrate``: the options. The work is imported when they are valid; it does not import torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from engine.cli.annexes import annex
from engine.cli.terminal import FAILED, OK, Parser, UsageError, show

REPORT, TEXT = "engine.compat.migrate.report", "engine.compat.migrate.report_text"
"""The modules that make the report and write it out."""


def main(argv: Sequence[str]) -> int:
    """Print the report.

    Returns:
        0; with ``--check`` 1 when something needs a change or could not be read. Paths that do not exist or have no sources end with status 2.
    """
    arguments = parser().parse_args(list(argv))
    paths = [Path(each) for each in arguments.paths]
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(f"{missing[0]} does not exist")
    found = annex(REPORT)
    report = found.migration(paths, arguments.exclude)
    if not report.files and not report.unread:
        raise UsageError(f"{', '.join(arguments.paths)}: there are no .py or .ipynb files")
    if arguments.json:
        print(json.dumps(found.as_json(report), indent=2))
    else:
        show(*annex(TEXT).lines(report, changes_only=arguments.changes))
    return FAILED if arguments.check and not report.works else OK


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = Parser(
        prog="fit migrate",
        description="Report where Python files and notebooks use Lightning and Accelerate, and what each use is here: it works as is (with the base "
        "class or import of engine), it works through engine.interop (only the import changes), or it needs a change, which is named. Sources are "
        "read; nothing in them is run or imported.",
    )
    top.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder with everything below it")
    top.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out files and folders of this name, such as 'test*'; may be repeated",
    )
    top.add_argument("--changes", action="store_true", help="print only what needs a change, and the summary")
    top.add_argument("--check", action="store_true", help="exit with status 1 when something needs a change")
    top.add_argument("--json", action="store_true", help="print one JSON value, with every use")
    return top
