"""Puts ``engine.interop.lightning`` in the place of Lightning, as if each import of a program and of the packages that it uses had been changed.

``install()`` comes before the first import of Lightning. From then on ``lightning``, ``lightning.pytorch`` and ``pytorch_lightning``, with
every module that is installed below them, look a name up in ``engine.interop.lightning`` and its modules. What trains (a Trainer, a loop, a
callback, a logger, a strategy) comes from there or is an ``ImportError``; helpers that a changed import would still take from Lightning itself
(``HELPERS``) come from it, and ``Finder.borrowed`` lists them. The code of Lightning's own demos is read as it is, with its imports
changed in the same way.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
OURS = "engine.interop.lightning"
HELPERS = (
    "utilities.types",
    "utilities.rank_zero",
    "utilities.exceptions",
    "utilities.imports",
    "utilities.parsing",
    "utilities.enums",
    "utilities.data",
    "utilities.memory",
    "utilities.model_helpers",
    "utilities.model_summary",
    "utilities.warnings",
    "fabric.utilities",
    "core.mixins",
    "core.saving.get_filesystem",
    "cli_lightning_logo",
)
"""Modules of Lightning with types, warnings and functions that take no part in a training, and single functions."""
DEMOS = "demos"


def tail(name: str) -> str:
    """``lightning.pytorch.callbacks.timer`` and ``pytorch_lightning.callbacks.timer`` are ``callbacks.timer``."""
    root, _, rest = name.partition(".")
    if root == "lightning_fabric":
        return f"fabric.{rest}".rstrip(".")
    return rest.removeprefix("pytorch").lstrip(".") if root == "lightning" else rest


def installed(name: str) -> ModuleSpec | None:
    """Where a module of the real Lightning lies; nothing is imported."""
    root, *parts = name.split(".")
    spec = PathFinder.find_spec(root)
    for i in range(len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([root, *parts[: i + 1]]), list(spec.submodule_search_locations))
    return spec


class Stand(ModuleType):
    """A module of Lightning's whose names are looked up by a :class:`Finder`."""

    finder: Finder

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return version(self.__name__.partition(".")[0].replace("_", "-"))
        if name.startswith("__"):
            raise AttributeError(name)
        return self.finder.look_up(self.__name__, name)


class Finder(MetaPathFinder, Loader):
    """Finds Lightning's modules as :class:`Stand` objects."""

    def __init__(self) -> None:
        self.real: dict[str, ModuleType] = {}
        self.borrowed: set[str] = set()
        """The names that came from Lightning itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ROOTS:
            return None
        found = installed(name)
        if found is None or found.origin is None:
            return None
        if tail(name).split(".")[0] == DEMOS:
            return spec_from_file_location(
                name, found.origin, submodule_search_locations=found.submodule_search_locations
            )
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Stand:
        module = Stand(spec.name)
        module.finder = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    def look_up(self, module: str, name: str) -> Any:
        """A name of a module of Lightning's: ours, a module below, or a helper of Lightning's.

        Raises:
            AttributeError: none of them.
        """
        parts = tail(module).split(".") if tail(module) else []
        for end in range(len(parts), -1, -1):
            place = ours(".".join([OURS, *parts[:end]]))
            found = getattr(place, name, None) if place is not None else None
            if found is not None and not isinstance(found, ModuleType):
                return found
        if installed(f"{module}.{name}") is not None:
            return importlib.import_module(f"{module}.{name}")
        if (
            any(f"{tail(module)}.{name}.".lstrip(".").startswith(f"{helper}.") for helper in HELPERS)
            or tail(module) == "utilities"
        ):
            with self.lightning_itself():
                value = getattr(importlib.import_module(module), name)
            self.borrowed.add(f"{tail(module)}.{name}".lstrip("."))
            return value
        raise AttributeError(f"{OURS} has no {name!r}, which is imported from {module}")

    @contextmanager
    def lightning_itself(self) -> Iterator[None]:
        """Lightning's own modules in the place of ours."""
        stands = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ROOTS}
        sys.modules.update(self.real)
        sys.meta_path.remove(self)
        try:
            yield
        finally:
            self.real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ROOTS}
            sys.modules.update(stands)
            sys.meta_path.insert(0, self)


def ours(name: str) -> ModuleType | None:
    """A module of ours, or ``None`` if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def install() -> Finder:
    """Put ours in the place of Lightning, in this process.

    Raises:
        RuntimeError: Lightning was imported already.
    """
    early = sorted(name for name in sys.modules if name in ROOTS)
    if early:
        raise RuntimeError(f"{', '.join(early)} was imported before install()")
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    importlib.import_module(OURS)
    finder = Finder()
    sys.meta_path.insert(0, finder)
    return finder
