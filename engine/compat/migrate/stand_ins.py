"""Stand-ins for our classes and modules: they have the same names, members and signatures, and no code, so that nothing imports torch.

``stand_ins.json`` has them as ``tests/compat/migrate/write_stand_ins.py`` found them in the live classes; a test compares the two.
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
    """The stand-in of a module of ours; ``None``: there is no such module."""
    entry = _table()["modules"].get(name)
    if entry is None:
        return None
    return module(entry["same"]) if "same" in entry else _Module(name, entry)


def stand_in(name: str) -> Any:
    """The stand-in of a public name: ``"engine.Fit"``."""
    place, _, last = name.rpartition(".")
    return getattr(module(place), last)


class _Module(ModuleType):
    """A module whose names are made when they are asked for."""

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
    entry = _table()["classes"][key]
    content: dict[str, Any] = {"__module__": entry["module"], "__annotations__": {}, "__stand_in__": True}
    if "refused" in entry:
        content["refused"] = entry["refused"]
    if "of" in entry:
        content["of"] = _class(entry["of"])
    for name, member in entry.get("members", {}).items():
        if not member.get("shown", True) and "raises" not in member:
            content["__annotations__"][name] = "Any"
        else:
            content[name] = _member(name, member)
    content["__signature__"] = _signature(entry.get("call"))
    return type(entry["name"], tuple(map(_class, entry.get("bases", ()))), content)


def _member(name: str, entry: Mapping[str, Any]) -> Any:
    """An attribute from which ``engine.compat.migrate.signatures.member`` reads the member."""
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
    """An attribute that only raises an error."""

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
    """The signature; something that is none if Python does not tell it."""
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
