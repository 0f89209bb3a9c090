"""Stand-ins for our classes and modules: the same names, members and signatures without code, so that ``fit migrate`` need not import torch.

``tests/compat/migrate/write_stand_ins.py`` writes ``stand_ins.json`` from the real classes; a test compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_name("stand_ins.json")


@functools.cache
def module(name: str) -> ModuleType | None:
    """The stand-in for one of our modules; ``None`` if there is no such module."""
    entry = _table()["modules"].get(name)
    if entry is None:
        return None
    return module(entry["same"]) if "same" in entry else _Module(name, entry)


def stand_in(name: str) -> Any:
    """The stand-in for a public name such as ``"engine.Fit"``."""
    module_name, _, attribute = name.rpartition(".")
    return getattr(module(module_name), attribute)


class _Module(ModuleType):
    """A module whose attributes are built from ``entry`` of the JSON table at their first access."""

    def __init__(self, name: str, entry: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._entry = entry
        self.__all__ = list(entry)
        self._patterns = [pattern for pattern in entry if "*" in pattern]

    def __getattr__(self, name: str) -> Any:
        key = (
            name
            if name in self._entry
            else next((pattern for pattern in self._patterns if fnmatch(name, pattern)), None)
        )
        if key is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        entry = self._entry[key]
        if "module" in entry:
            value: Any = module(entry["module"])
        elif "class" in entry:
            value = _class(entry["class"])
        else:
            value = _function(entry["function"], entry["call"]) if "function" in entry else object()
        setattr(self, name, value)
        return value


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table


@functools.cache
def _class(key: str) -> type:
    """Build the stand-in for a class from the entry ``key`` of the JSON table."""
    entry = _table()["classes"][key]
    namespace: dict[str, Any] = {"__module__": entry["module"], "__annotations__": {}, "__stand_in__": True}
    if "refused" in entry:
        namespace["refused"] = entry["refused"]
    if "of" in entry:
        namespace["of"] = _class(entry["of"])
    for name, member in entry.get("members", {}).items():
        if not member.get("shown", True) and "raises" not in member:
            namespace["__annotations__"][name] = "Any"
        else:
            namespace[name] = _member(name, member)
    namespace["__signature__"] = _signature(entry.get("call"))
    return type(entry["name"], tuple(map(_class, entry.get("bases", ()))), namespace)


def _member(name: str, entry: Mapping[str, Any]) -> Any:
    """Build an attribute that :func:`engine.compat.migrate.signatures.member` describes as ``entry`` says: a method, a property or a value."""
    if "raises" in entry:
        return _Raises()
    if entry.get("call") is not None:
        return _function(name, [["self", 0], *entry["call"]])
    if "type" not in entry and entry.get("settable", True):
        return None
    getter = _function(name, [["self", 0]])
    if "type" in entry:
        getter.__annotations__["return"] = _class(entry["type"])
    return property(getter, getter if entry.get("settable", True) else None)


class _Raises:
    """An attribute that raises ``AttributeError`` whenever it is read."""

    def __get__(self, owner: object, kind: type) -> None:
        raise AttributeError


def _function(name: str, call: list[list[Any]] | None) -> Callable[..., Any]:
    def function(*args: object, **kwargs: object) -> None: ...

    function.__name__ = function.__qualname__ = name
    function.__annotations__ = {}
    function.__defaults__ = (None,) * sum(len(parameter) > 2 for parameter in call or ())
    function.__signature__ = _signature(call)  # type: ignore[attr-defined]
    return function


def _signature(call: list[list[Any]] | None) -> Any:
    """The signature with these parameters; if unknown, a text that makes ``inspect.signature`` raise ``TypeError``, as for the real object."""
    if call is None:
        return "unknown"
    return Signature(
        [
            Parameter(name, _KINDS[kind], default=default[0] if default else Parameter.empty)
            for name, kind, *default in call
        ],
        __validate_parameters__=False,
    )


_KINDS = (
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)
