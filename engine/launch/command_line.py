"""The command line of this process, for the other ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

TOOLS = (
    "pdb",
    "cProfile",
    "profile",
    "trace",
    "coverage",
    "debugpy",
    "kernprof",
    "line_profiler",
    "memory_profiler",
    "pyinstrument",
    "scalene",
    "viztracer",
)
"""Programs that run another one, for rank 0 only: they need a terminal, serve a port or write one file."""
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def repeatable(world_size: int) -> list[str]:
    """The command that starts this program again: its interpreter with its options, its script or module, its arguments.

    A debugger or profiler that runs the program (one of ``TOOLS``) is left out.

    Raises:
        RuntimeError: it cannot be repeated (interactive, notebook, pytest, script from standard input, a worker process).
    """
    main = sys.modules.get("__main__")
    ipython = sys.modules.get("IPython")
    if "ipykernel" in sys.modules:
        reason = "it is a Jupyter kernel"
    elif hasattr(sys, "ps1") or sys.flags.interactive or (ipython is not None and ipython.get_ipython() is not None):
        reason = "it is an interactive interpreter"
    elif "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        reason = "it is a pytest session"
    elif multiprocessing.parent_process() is not None:
        reason = "it is a worker of the multiprocessing module"
    elif getattr(main, "__file__", None) == "<stdin>" or (sys.orig_argv[1:] in ([], ["-"])):
        reason = "the script was read from standard input"
    elif not sys.executable or getattr(sys, "frozen", False):
        reason = "it is an embedded or frozen interpreter"
    elif (found := without_tool(sys.orig_argv[1:], sys.argv)) is None:
        reason = f"it is unclear which of {sys.orig_argv} are the script and its arguments"
    else:
        return [sys.executable, *found]
    raise RuntimeError(
        f"{world_size} processes were requested, but the other ranks are started by repeating the command line of this one, and {reason}. "
        f"Write a script and start it with: torchrun --nproc-per-node {world_size} script.py"
    )


def without_tool(given: Sequence[str], script: Sequence[str]) -> list[str] | None:
    """The interpreter's arguments without a tool that runs the script.

    Args:
        given: all arguments of the interpreter: ``["-m", "pdb", "train.py", "--lr", "1"]``.
        script: ``sys.argv`` as the tool leaves it to the script: its file and its arguments.

    Returns:
        ``["train.py", "--lr", "1"]``; ``None`` when a tool's arguments cannot be distinguished from the script's.
    """
    first = 0
    while first < len(given) and given[first].startswith("-") and not given[first].startswith(("-m", "-c")):
        first += 2 if given[first] in _WITH_VALUE else 1
    options, rest = list(given[:first]), list(given[first:])
    if _program(rest) not in TOOLS:
        return list(given)
    at = len(rest) - len(script)
    if at < 1 or rest[at + 1 :] != list(script[1:]):
        return None
    if rest[at - 1] in ("-m", "--module"):
        return [*options, "-m", *rest[at:]]
    return [*options, *rest[at:]] if os.path.realpath(rest[at]) == os.path.realpath(script[0]) else None


def _program(rest: Sequence[str]) -> str:
    """The module or the command that the interpreter runs; ``""`` for a script, whatever its name."""
    if not rest or rest[0].endswith(".py"):
        return ""
    if rest[0].startswith("-m"):
        return (rest[0][2:] or "".join(rest[1:2])).split(".")[0]
    return Path(rest[0]).name


def first_directory() -> str | None:
    """The directory of the command line, if it names the script by a relative path: the script may have changed directory since."""
    file = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    for argument in sys.orig_argv[1:]:
        if argument and not os.path.isabs(argument) and file.endswith(os.sep + argument):
            return file[: -len(argument)]
    return None
