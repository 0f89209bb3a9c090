"""Completion with argcomplete: ``fit completion SHELL`` prints a script that makes the shell call ``fit`` with ``_ARGCOMPLETE`` set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

import argcomplete
from argcomplete.completers import BaseCompleter, FilesCompleter

from engine import callbacks
from engine.cli import main as cli
from engine.cli.terminal import UsageError
from engine.config.settings import KINDS
from engine.planning.device_table import DEVICES

WORDS = {"resume": ("last", "auto", "best"), "checkpoint": ("last", "best"), "device": tuple(DEVICES)}
"""Words that options take besides paths, by option."""


def run(options: argparse.Namespace) -> int:
    """Print the script of one shell."""
    script = argcomplete.shellcode(["fit"], shell=options.shell)
    # After these characters no space is added, because the word continues. argcomplete does not include the dot of "model.".
    print(script.replace("[=/:]", "[=/:.]"), end="")
    return 0


def complete() -> None:
    """Print the completions of the word at the shell's cursor, and end the process.

    Raises:
        UsageError: the variables in which a shell passes the line and the cursor are not set.
    """
    try:
        words = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    except (KeyError, ValueError) as error:
        raise UsageError(
            "_ARGCOMPLETE is set, which asks for completions of COMP_LINE, a text, at COMP_POINT, a number: "
            f"{type(error).__name__}: {error}; unset _ARGCOMPLETE to run a command"
        ) from error
    # zsh passes the whole line: variables and other commands may precede fit.
    begin = max((index for index, word in enumerate(words, 1) if word.endswith((";", "|", "&"))), default=0)
    start = next((index for index in range(begin, len(words)) if os.path.basename(words[index]) == "fit"), 0)
    commands = [word for word in words[start + 1 : start + 2] if word in cli.COMMANDS]
    # argcomplete gives the parser the words after the one with this number, counted from 1.
    os.environ["_ARGCOMPLETE"] = str(start + 1 + len(commands))
    argcomplete.autocomplete(
        cli.COMMANDS[commands[0]].parser() if commands else cli.parser(),
        always_complete_options=False,
        default_completer=_Values(),
    )


class _Values(BaseCompleter):
    """Completes the values of all arguments without ``choices``: words or files."""

    def __call__(
        self, *, prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, **_: object
    ) -> Iterable[str]:
        options = [option for option in getattr(parser, "active_actions", ()) if option.option_strings]
        if options and action not in options:  # the word is the value of an option
            return []
        name, equals, value = prefix.partition("=")
        if action.dest == "set" and equals:
            return [f"{name}={word}" for word in _fitting(value, KINDS[name].words if name in KINDS else ())]
        return _fitting(prefix, _words(action.dest))


def _fitting(prefix: str, words: Iterable[str]) -> Iterable[str]:
    """The words that start with ``prefix``; without any, the matching files, except in bash, which finds files by itself."""
    matches = [word for word in words if word.startswith(prefix)]
    if matches or os.environ.get("_ARGCOMPLETE_SHELL") == "bash":
        return matches
    return [name for name in FilesCompleter()(prefix) if name.isprintable()]  # other names could control the terminal


def _words(argument: str) -> Iterable[str]:
    if argument == "command":
        return cli.COMMANDS
    if argument == "callback":
        return [name for name in dir(callbacks) if name[0].isupper()]  # not functions
    if argument == "set":
        names = [f"{name}=" for name, kind in KINDS.items() if not kind.code_only]
        return [*names, "model.", "data.", "callbacks."]
    return WORDS.get(argument, ())
