"""Changes the imports of Lightning and Accelerate in published packages to ``engine.interop`` while Python loads their sources; nothing else changes.

``install(packages)`` comes before the first import of the packages. Unlike ``as_lightning.py`` it borrows nothing from Lightning: an import that the
doors lack fails, as it does in a project whose imports were edited.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

DOORS = {
    "pytorch_lightning": "engine.interop.lightning",
    "lightning": "engine.interop.lightning",
    "lightning_fabric": "engine.interop.lightning.fabric",
    "accelerate": "engine.interop.accelerate",
}


def changed(module: str) -> str:
    """The module in our place of a module of Lightning or Accelerate; another module's own name."""
    root, dot, rest = module.partition(".")
    return f"{DOORS[root]}{dot}{rest}" if root in DOORS else module


class Imports(ast.NodeTransformer):
    """Changes the import statements of a source."""

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for alias in node.names:
            root = alias.name.split(".")[0]
            statements.append(ast.Import([ast.alias(changed(alias.name), alias.asname)]))
            if root in DOORS and alias.asname is None:
                statements.append(ast.Import([ast.alias(changed(root), root)]))
        return [ast.copy_location(statement, node) for statement in statements]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if not node.level and node.module is not None:
            node.module = changed(node.module)
        return node


class Loader(SourceFileLoader):
    """Compiles a source with its imports changed; no bytecode is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(Imports().visit(ast.parse(self.get_data(path), path)))
        code = compile(tree, path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code


class Finder(MetaPathFinder):
    """Finds the modules of ``packages``."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.split(".")[0] in self.packages else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install(packages: Sequence[str]) -> None:
    """Change the imports of these packages, in this process."""
    sys.meta_path.insert(0, Finder([package for package in packages if package not in DOORS]))


def installed() -> bool:
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def library(name: str) -> Any:
    """The library that a script itself imports, which is a door where the imports are changed."""
    return import_module(changed(name) if installed() else name)
