"""``fit migrate``. Imports no torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.cli.annexes import annex
from engine.cli.terminal import FAILED, OK, UsageError, show

REPORT, TEXT = "engine.compat.migrate.report", "engine.compat.migrate.report_text"
"""The modules that make the report and format it as text."""


def run(options: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        0; with ``--check`` 1 if something needs a change or could not be read. Paths that do not exist or contain no sources lead to status 2.
    """
    paths = [Path(path) for path in options.paths]
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(f"{missing[0]} does not exist")
    report_module = annex(REPORT)
    report = report_module.migration(paths, options.exclude)
    if not report.files and not report.unread:
        raise UsageError(f"{', '.join(options.paths)}: there are no .py or .ipynb files")
    if options.json:
        print(json.dumps(report_module.as_json(report), indent=2))
    else:
        show(*annex(TEXT).lines(report, changes_only=options.changes))
    return FAILED if options.check and not report.works else OK
