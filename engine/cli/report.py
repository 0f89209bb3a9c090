"""``fit report``: write a page or a table about runs from the files in their folders."""

from __future__ import annotations

import argparse
import importlib
import sys

from engine import callbacks
from engine.cli.class_paths import CALLBACKS
from engine.cli.terminal import FAILED, OK, UsageError, complain, show


def run(options: argparse.Namespace) -> int:
    """Write the page, or with ``--csv`` the table, and print its path; with ``--serve``, serve the page and print its address. ``--csv -`` prints
    the table alone.

    Returns:
        0, or 1 when it cannot be written. Folders without runs end with status 2.
    """
    if options.out is not None and not options.out.endswith(".html"):
        raise UsageError(f"--out {options.out}: the page needs a name that ends in .html")
    answers = {"--out": options.out, "--csv": options.csv, "--serve": options.serve}
    requested = [name for name, value in answers.items() if value is not None]
    if len(requested) > 1:
        raise UsageError(f"{' and '.join(requested)} are different answers: give one of them")
    try:
        if options.serve is not None:
            with callbacks.ReportServer(options.folders, options.serve, max_points=options.max_points) as server:
                show(f"{server.url} follows the runs; Ctrl-C ends it")
                server.serve()
            return OK
        if options.csv == "-":
            text: str = importlib.import_module(f"{CALLBACKS}.report.run_table").run_table_text(options.folders)
            if sys.stdout.isatty():
                show(*text.splitlines())  # nothing in the cells controls the terminal
            else:
                sys.stdout.write(text)
            return OK
        if options.csv is not None:
            path = callbacks.write_run_table(options.folders, options.csv)
        else:
            path = callbacks.write_report(options.folders, options.out, max_points=options.max_points)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(error) from None
    except OSError as error:
        complain(error)
        return FAILED
    show(path)
    return OK
