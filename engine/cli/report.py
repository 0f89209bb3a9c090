"""``fit report``: write a page about runs from the files in their folders."""

from __future__ import annotations

import argparse

from engine import callbacks
from engine.cli.terminal import FAILED, OK, UsageError, complain, show


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path.

    Returns:
        0, or 1 when it cannot be written. Folders without runs end with status 2.
    """
    if options.out is not None and not options.out.endswith(".html"):
        raise UsageError(f"--out {options.out}: the page needs a name that ends in .html")
    try:
        path = callbacks.write_report(options.folders, options.out, max_points=options.max_points)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(error) from None
    except OSError as error:
        complain(error)
        return FAILED
    show(path)
    return OK
