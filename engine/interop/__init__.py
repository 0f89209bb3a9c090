"""Other trainers' names, for users' imports. The modules are in ``engine.compat``; :class:`Moved` finds each under its path here, too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class Moved(MetaPathFinder, Loader):
    """Finds a module under another path: the same object, so that its classes exist once."""

    packages: dict[str, str] = {}
    """A package that users import -> the package that has its modules."""
    absent: dict[str, str] = {}
    """The path of a module that does not exist here -> what to use instead."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}: {self.absent[name]}", name=name)
        package, _, last = name.rpartition(".")
        if package not in self.packages:
            return None
        source = f"{self.packages[package]}.{last}"
        # Without such a module the error names the path that the user imports.
        return ModuleSpec(name, self, origin=source) if find_spec(source) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # which the import system is about to replace
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def moved(package: str, source: str) -> None:
    """Let the modules of the package ``source`` be found in ``package``, too, beside its own."""
    Moved.packages[package] = source


sys.meta_path.append(Moved())  # asked last: it finds what has no file under its name
