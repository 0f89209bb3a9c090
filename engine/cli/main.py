"""The console command ``fit``. A command's module is imported when the command is given, so that the rest starts at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from engine.errors import nearest

COMMANDS: dict[str, tuple[str, str]] = {
    "checkpoint": ("engine.cli.checkpoint", "list, show, verify, export, convert and prune checkpoints"),
    "launch": ("engine.cli.launch", "start a script as the processes of one job, on this machine or on several; watch and restart them"),
    "env": ("engine.cli.env", "print versions, devices, the distributed environment, and each setting with its origin"),
}
"""Command -> the module whose ``main(arguments) -> exit status`` runs it, and its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fit`` with ``argv`` (``None``: the process's own arguments).

    Returns:
        The exit status: 0 when all went well. Wrong arguments end the process with status 2, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    width = max(map(len, COMMANDS)) + 2
    parser = argparse.ArgumentParser(
        prog="fit",
        description="Train PyTorch models: exact, elastic, free, safe and planned.",
        epilog="commands:\n" + "\n".join(f"  {name:<{width}}{line}" for name, (_, line) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fit-trainer {version('fit-trainer') or 'not installed'}")
    parser.add_argument("command", nargs="?", metavar="command", help="'fit COMMAND --help' tells more")
    # What follows the command is its own.
    known = parser.parse_args(arguments[:1])
    if known.command is None:
        parser.print_help()
        return 0
    if known.command not in COMMANDS:
        parser.error(f"unknown command {known.command!r}{nearest(known.command, COMMANDS)}; possible: {', '.join(COMMANDS)}")
    return int(importlib.import_module(COMMANDS[known.command][0]).main(arguments[1:]))


def version(distribution: str) -> str | None:
    """The version of an installed distribution, found without importing it; ``None`` when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
