"""The console command ``fit``.

A command's module is imported by name, for that command alone, once its options are valid: help and completion need no torch.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from engine.cli import options
from engine.cli.terminal import STATUSES, Parser, guarded, open_streams
from engine.utils.errors import nearest
from engine.utils.garbage import collect_none_at_exit, uncollected


@dataclass(frozen=True)
class Command:
    """A subcommand of ``fit``."""

    parser: Callable[[], Parser]
    """Creates the parser of the command's options, which also names the module that runs the command."""
    line: str
    """The command's line in ``fit --help``."""


COMMANDS = {
    "run": Command(options.run, "train what a Python path or a file of settings describes"),
    "validate": Command(options.validate, "run the validation loop with a checkpoint's weights"),
    "test": Command(
        options.test, "run the test loop with a checkpoint's weights; alone: check this installation and its devices"
    ),
    "predict": Command(options.predict, "write the predictions of a checkpoint's weights to a file"),
    "checkpoint": Command(options.checkpoint, "list, show, verify, export, convert, pack and prune checkpoints"),
    "report": Command(options.report, "write an HTML page about runs: curves, times, configuration, differences"),
    "plan": Command(options.plan, "forecast a run on many ranks: memory, communication, time, and whether it fits"),
    "replay": Command(
        options.replay, "run one step of an earlier training again, exactly, and show what happened in it"
    ),
    "config": Command(
        options.config, "write a commented file of settings: from answers, defaults, or Accelerate's file; check one"
    ),
    "migrate": Command(options.migrate, "report where sources use Lightning and Accelerate, and what each use is here"),
    "tokens": Command(options.tokens, "write the tokens of texts to a file that TokenFile reads"),
    "launch": Command(
        options.launch,
        "start a script as the processes of one job, on this machine or on several; monitor and restart them",
    ),
    "env": Command(
        options.env, "print versions, devices, the distributed environment, and each setting with its origin"
    ),
    "completion": Command(options.completion, "print a script that completes fit's words in bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fit`` with ``argv`` (``None``: the process's own arguments).

    Returns:
        The exit status; see :mod:`engine.cli.terminal`. Wrong options end the process with status 2, as argparse does.
    """
    open_streams()
    if argv is None:
        atexit.register(collect_none_at_exit)  # first of all handlers, so that it runs last
    if argv is None and "_ARGCOMPLETE" in os.environ:  # a shell asks for completions of its line
        return guarded(lambda: importlib.import_module("engine.cli.completion").complete())
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = parser()
    # The first word is the command; the rest belongs to it.
    first_word = top.parse_args(arguments[:1])
    if first_word.command is None:
        top.print_help()
        return 0
    if first_word.command not in COMMANDS:
        top.error(
            f"unknown command {first_word.command!r}{nearest(first_word.command, COMMANDS)}; possible: {', '.join(COMMANDS)}"
        )
    return guarded(lambda: run_command(first_word.command, arguments[1:]))


def parser() -> argparse.ArgumentParser:
    """The parser of what precedes a command's own arguments."""
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{command.line}" for name, command in COMMANDS.items())
    top = Parser(
        prog="fit",
        description="Train PyTorch models.",
        epilog=f"commands:\n{lines}\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fit-trainer {version('fit-trainer') or 'not installed'}")
    top.add_argument("command", nargs="?", metavar="command", help="see 'fit COMMAND --help'")
    return top


def run_command(name: str, words: Sequence[str]) -> int:
    """Run one command with its words, by ``run`` of the module that its parser in :mod:`engine.cli.options` names as ``run_by``.

    Wrong words end the process with status 2, before that module is imported.
    """
    command_parser = COMMANDS[name].parser()
    chosen = command_parser.parse_args(list(words))
    command_parser.check(chosen)
    with uncollected():  # torch is a million objects
        command = importlib.import_module(chosen.run_by)
    return int(command.run(chosen))


def version(distribution: str) -> str | None:
    """The version of an installed distribution, found without importing it; ``None`` when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
