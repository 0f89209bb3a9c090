"""The modules and names of another trainer's package, from a file: what exists there, and what each name is."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeerName:
    """A name in a module of another trainer."""

    kind: str
    """``"class"``, ``"function"``, ``"object"``, ``"type"`` (an alias or a variable of types), ``"protocol"``, ``"error"``, ``"enum"``,
    ``"value"``, ``"log"``, ``"module"``, or ``"foreign"``: an object of another package."""
    module: str
    """The module that defines it: a path within the trainer's package, or for ``"module"`` and ``"foreign"`` a module's full name."""
    name: str
    detail: Any = None
    """The value; the members of an enum; the names of a protocol's members, those of methods with parentheses; the built-in base class of an error;
    whether a module is one of the package."""


class PeerNames:
    """The names of ``package``. The file is read when they are first asked for; ``tests/compat/paths/write_public_names.py`` writes it."""

    def __init__(self, package: str, file: Path) -> None:
        self.package, self.file = package, file

    @cached_property
    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return content

    @property
    def version(self) -> str:
        """The release that the names are of."""
        return str(self._content["version"])

    @property
    def modules(self) -> dict[str, dict[str, Any]]:
        """The paths of the modules within the package, and what the file says about each."""
        modules: dict[str, dict[str, Any]] = self._content["modules"]
        return modules

    def public(self, path: str) -> list[str]:
        """The names that ``from module import *`` gives."""
        entry = self.modules[path]
        return entry["all"].split() if "all" in entry else [name for name in self.names(path) if name[0] != "_"]

    def names(self, path: str) -> list[str]:
        """All names of a module, without those of its submodules."""
        return [*self._index(path)]

    def find(self, path: str, name: str) -> PeerName | None:
        """The name in a module; ``None`` if the module lacks it."""
        kind, detail = self._index(path).get(name, ("", None))
        if kind == "module":
            return PeerName(kind, detail.removeprefix("."), "", detail.startswith("."))
        if kind == "value":
            return PeerName(kind, path, name, ast.literal_eval(detail))
        if kind != "from":
            return PeerName(kind, path, name, detail) if kind else None
        origin, last = detail
        if not origin.startswith("."):
            return PeerName("foreign", origin, last)
        # A class that is nested in another one has no entry of its own.
        return PeerName("class", origin[1:], last) if "." in last else self.find(origin[1:], last)

    def _index(self, path: str) -> dict[str, tuple[str, Any]]:
        """By name: its kind, and what the file says about it."""
        if path not in self._indexes:
            entry = self.modules.get(path, {})  # a path of an earlier release
            index: dict[str, tuple[str, Any]] = {}
            for kind, plural in _LISTED.items():
                index |= dict.fromkeys(entry.get(plural, "").split(), (kind, None))
            for kind, plural in _DETAILED.items():
                index |= {name: (kind, detail) for name, detail in entry.get(plural, {}).items()}
            for origin, words in entry.get("from", {}).items():
                for name, _, last in (word.partition("=") for word in words.split()):
                    index[name] = "from", (origin, last or name)
            self._indexes[path] = index
        return self._indexes[path]

    @cached_property
    def _indexes(self) -> dict[str, dict[str, tuple[str, Any]]]:
        return {}


_LISTED = {"class": "classes", "function": "functions", "log": "logs", "object": "objects", "type": "types"}
_DETAILED = {"enum": "enums", "error": "errors", "module": "modules", "protocol": "protocols", "value": "values"}
"""Kind of a name -> the key of its names in the file."""
