"""Lets every process of a run of tests note which parts of the library it executes, for ``tests_of.py --write``.

Python imports this file at its start, in whatever process the folder is on ``PYTHONPATH``: a pytest worker, a rank, a command. The library's
modules are then loaded as ``marked.py`` has compiled them: each part of a function (what runs from its first to its last statement) begins
with ``__executed__[number] = 1``. The array is a file of the worker that all processes below it share, so a process that is killed loses nothing.
"""

from __future__ import annotations

import builtins
import marshal
import mmap
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

FOLDER = "EXECUTED_FOLDER"
"""The variable with the folder of the compiled modules."""
FILE = "EXECUTED_FILE"
"""The variable with the shared array of this process."""
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def share(path: str) -> mmap.mmap:
    """Mark in this file from now on."""
    with open(path, "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)
    builtins.__executed__ = marks  # type: ignore[attr-defined]
    return marks


class Loader(SourceFileLoader):
    """Loads a module that ``marked.py`` has compiled."""

    def get_code(self, fullname: str) -> CodeType:
        with open(os.path.join(os.environ[FOLDER], fullname), "rb") as file:
            code: CodeType = marshal.load(file)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's own lines. The functions that these call do not count: an import says nothing about who tests them."""
        marks = builtins.__executed__  # type: ignore[attr-defined]
        builtins.__executed__ = bytearray(len(marks))  # type: ignore[attr-defined]
        try:
            super().exec_module(module)
        finally:
            builtins.__executed__ = marks  # type: ignore[attr-defined]


class Finder:
    """Finds the modules of this checkout; a copy of the library elsewhere is loaded as usual."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("engine", "callbacks"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and str(spec.origin).startswith(ROOT) and os.path.exists(f"{os.environ[FOLDER]}/{name}"):
            spec.loader = Loader(name, str(spec.origin))
        return spec


if FOLDER in os.environ:
    builtins.__executed__ = bytearray(os.path.getsize(f"{os.environ[FOLDER]}/.empty"))  # type: ignore[attr-defined]
    if FILE in os.environ:
        share(os.environ[FILE])
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
