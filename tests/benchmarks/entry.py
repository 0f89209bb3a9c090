"""An entry of ``published_modules.py``: a module that somebody has published, and a short training of it."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import changed_imports
from torch import nn

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of ``Trainer`` for a short training without files."""


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    name: str
    train: Callable[[], nn.Module]
    """Builds the module and its data, trains it, and returns it."""
    package: str
    """The distribution that has it."""
    modules: tuple[str, ...]
    """What must be importable."""
    group: str
    source: str
    """The file that must be there under ``--sources``; empty if the package itself is enough."""
    note: str


class Entries(list[Entry]):
    """The entries of a file, in their order."""

    def add(
        self, package: str, *modules: str, group: str = "packages", source: str = "", note: str = ""
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        """Decorates the function that trains; the entry has its name."""

        def decorate(train: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            self.append(Entry(train.__name__, train, package, modules, group, source, note))
            return train

        return decorate


def definitions(path: str) -> dict[str, Any]:
    """The imports, functions, classes and constants of a script or notebook under ``--sources``; the rest of it is not run."""
    file = Path(os.environ["PUBLISHED_SOURCES"]) / path
    text = file.read_text()
    if file.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        text = "\n\n".join(
            "\n".join(line for line in cell.splitlines() if not line.lstrip().startswith(("!", "%"))) for cell in cells
        )
    tree = ast.parse(text)
    if changed_imports.installed():
        tree = ast.fix_missing_locations(changed_imports.Imports().visit(tree))
    tree.body = [node for node in tree.body if defines(node)]
    module = ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module
    exec(compile(tree, str(file), "exec"), vars(module))
    return vars(module)


def defines(node: ast.stmt) -> bool:
    """Whether a statement imports something, or defines a function, a class or a constant."""
    if isinstance(node, ast.If):
        return all(isinstance(each, ast.Import | ast.ImportFrom) for each in node.body)
    if isinstance(node, ast.Assign):
        literal = (ast.Constant, ast.Tuple, ast.List, ast.Load, ast.UnaryOp, ast.USub)
        return all(isinstance(each, literal) for each in ast.walk(node.value))
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
