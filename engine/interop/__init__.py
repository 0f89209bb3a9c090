"""Packages with other trainers' names, for users. Their modules are in ``engine.compat``; :class:`Moved` makes them importable from here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from engine.compat.door import SameModule


class Moved(MetaPathFinder, SameModule):
    """Finds the modules of :attr:`packages` under a second path."""

    packages: dict[str, str] = {}
    """Package that users import -> the package that contains its modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, last = name.rpartition(".")
        if package not in self.packages:
            return None
        source = f"{self.packages[package]}.{last}"
        # If there is no such module, the error thus names the path that the user imports.
        return ModuleSpec(name, self, origin=source) if find_spec(source) is not None else None


def moved(package: str, source: str) -> None:
    """Make the modules of the package ``source`` importable from ``package`` too."""
    Moved.packages[package] = source


sys.meta_path.append(Moved())  # last, so that it is asked only for modules that have no file
