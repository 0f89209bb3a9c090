"""Write the ``public_names.json`` of ``engine/compat/lightning`` and ``engine/compat/accelerate``: the modules and names of the installed packages.

    python tests/compat/paths/write_public_names.py            # --check: report what differs instead

``engine.compat.peer_names`` reads them. ``test_public_names.py`` fails when a file is out of date. A module that cannot be imported here is left out.
"""

from __future__ import annotations

import ast
import enum
import importlib
import json
import logging
import pkgutil
import sys
import types
import typing
import warnings
from collections import defaultdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PEERS = {"lightning": "lightning", "accelerate": "accelerate"}
"""Package of another trainer -> folder in ``engine/compat``."""
LEFT_OUT = ("__main__", "__setup__", "__version__")
"""Modules that are scripts, or whose name is that of a text."""
_TYPING = (typing.TypeVar, type(typing.Optional[int]), type(int | str), type(typing.List[int]))  # noqa: UP006, UP045  # the classes of these


class Names:
    """The names of a package's modules."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.modules: dict[str, types.ModuleType] = {}
        self._visit(package)

    def _visit(self, name: str) -> None:
        try:
            module = importlib.import_module(name)
        except BaseException:  # a script may exit
            return
        self.modules[name] = module
        for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
            if child.name not in LEFT_OUT:
                self._visit(f"{name}.{child.name}")

    def table(self) -> dict[str, Any]:
        """By module, its path within the package: what its names are."""
        return {
            self._relative(name).removeprefix("."): self._entry(name, module)
            for name, module in sorted(self.modules.items())
        }

    def _relative(self, module: str) -> str:
        """A module's path within the package, which begins with a dot; other packages' modules as they are."""
        is_own = module == self.package or module.startswith(f"{self.package}.")
        return f".{module.removeprefix(self.package).removeprefix('.')}" if is_own else module

    def _entry(self, path: str, module: types.ModuleType) -> dict[str, Any]:
        words: dict[str, list[str]] = defaultdict(list)
        imported: dict[str, list[str]] = defaultdict(list)
        entry: dict[str, Any] = defaultdict(dict)
        for name, value in sorted(vars(module).items()):
            if name.startswith("__") and name not in getattr(module, "__all__", ("__version__",)):
                continue
            origin = self._origin(path, name, value)
            if isinstance(value, types.ModuleType):
                if value.__name__ != f"{path}.{name}":
                    entry["modules"][name] = self._relative(value.__name__)
            elif origin is not None:
                place, last = origin
                imported[self._relative(place)].append(name if name == last else f"{name}={last}")
            elif isinstance(value, type) and issubclass(value, BaseException):
                entry["errors"][name] = next(base.__name__ for base in value.__mro__ if base.__module__ == "builtins")
            elif isinstance(value, type) and issubclass(value, enum.Enum):
                entry["enums"][name] = {
                    member.name: member.value for member in value if type(member.value) in (int, str)
                }
            elif isinstance(value, type) and getattr(value, "_is_protocol", False):
                entry["protocols"][name] = _members(value)
            elif isinstance(value, type):
                words["classes"].append(name)
            elif isinstance(value, types.FunctionType | types.BuiltinFunctionType) or hasattr(value, "__wrapped__"):
                words["functions"].append(name)
            elif isinstance(value, logging.Logger):
                words["logs"].append(name)
            elif isinstance(value, _TYPING):
                words["types"].append(name)
            elif _is_literal(value):
                entry["values"][name] = _literal(value)
            else:
                words["objects"].append(name)
        entry |= {kind: " ".join(names) for kind, names in words.items()}
        if imported:
            entry["from"] = {place: " ".join(names) for place, names in sorted(imported.items())}
        if "__all__" in vars(module):
            entry["all"] = " ".join(module.__all__)
        return dict(sorted(entry.items()))

    def _origin(self, path: str, name: str, value: Any) -> tuple[str, str] | None:
        """The module and the name by which another module has the object; ``None`` if the module ``path`` defines it."""
        place, last = (
            getattr(value, "__module__", None),
            getattr(value, "__qualname__", None) or getattr(value, "_name", None),
        )
        if not isinstance(place, str) or not isinstance(last, str) or (place, last) == (path, name):
            return None
        if place.startswith(self.package) and place not in self.modules:
            return None
        try:
            return (place, last) if resolve_name(f"{place}:{last}") is value else None
        except (ImportError, AttributeError, ValueError):
            return None


def _members(protocol: Any) -> str:
    """The names of a protocol's members, those of methods with parentheses."""
    members = sorted(typing._get_protocol_attrs(protocol))  # type: ignore[attr-defined]  # public from Python 3.13 on
    return " ".join(f"{name}()" if callable(getattr(protocol, name, None)) else name for name in members)


def _is_literal(value: Any) -> bool:
    """Whether a file can have the value: it is plain, and no path of this machine."""
    try:
        return "'/" not in repr(value) and ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _literal(value: Any) -> str:
    """The value's text; elements of a set in their order, which is another in each process."""
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, set) and value else repr(value)


def text(package: str) -> str:
    """The text of a package's file: one line for each kind of name of a module."""
    names = Names(package)
    version = importlib.import_module(package).__version__
    modules = ",\n".join(
        f"{json.dumps(path)}: {{\n"
        + ",\n".join(f" {json.dumps(kind)}: {json.dumps(value)}" for kind, value in entry.items())
        + "}"
        for path, entry in names.table().items()
    )
    return f'{{"version": "{version}",\n"modules": {{\n{modules}\n}}}}\n'


def file(package: str) -> Path:
    """The file of a package's names."""
    return ROOT / "engine/compat" / PEERS[package] / "public_names.json"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()
    for peer in PEERS:
        if sys.argv[1:] == ["--check"]:
            print(f"{peer}: {'the same' if file(peer).read_text() == text(peer) else 'out of date'}")
        else:
            file(peer).write_text(text(peer))
