"""Write ``engine/compat/migrate/stand_ins.json``: what our classes and the names of ``engine.interop`` are, asked of themselves.

    python tests/compat/migrate/write_stand_ins.py    # --print: to standard output instead

``fit migrate`` reads it, because an import of the classes would import torch. ``test_stand_ins.py`` fails when the file is out of date.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import sys
import types
from typing import Any

import engine
from engine.compat.accelerate.names import FUNCTIONS
from engine.compat.lightning.names import CLASSES
from engine.compat.lightning.trainer_view import TrainerView
from engine.compat.migrate.signatures import OURS, Member, member, set_by, signature
from engine.compat.migrate.stand_ins import FILE
from engine.compat.refusals import refused_class
from engine.interop import Moved

NOT_LITERAL = "..."
"""The default of a parameter that JSON has no value for."""
PATTERN = "is_*_available"
"""The names that Accelerate's helpers make by themselves."""
PACKAGES = ("engine.interop.lightning", "engine.interop.accelerate")


class Table:
    """The table, filled from the live classes."""

    def __init__(self) -> None:
        self.classes: dict[str, dict[str, Any]] = {}
        self._live: dict[str, type] = {}
        listed = [importlib.import_module(name) for name in ("callbacks", "callbacks.loggers")]
        self.modules = {
            "engine": {name: self.value(getattr(engine, name)) for name in engine.__all__ if name != "launch"},
            **{each.__name__: {name: self.value(getattr(each, name)) for name in each.__all__} for each in listed},
            **{
                place: self.names(module) if path_of(module) == place else {"same": path_of(module)}
                for place, module in sorted(_places().items())
            },
        }
        self.modules["engine"]["TrainerView"] = self.value(TrainerView)
        self.modules["torch.nn"] = {"Module": self.value(importlib.import_module("torch.nn").Module)}

    def names(self, module: types.ModuleType) -> dict[str, Any]:
        """The names of a module, and those that its ``__getattr__`` gives, of all that are known."""
        names = {*dir(module)}
        if "__getattr__" in vars(module):
            names |= {*CLASSES, *FUNCTIONS, PATTERN, *(name for each in _places().values() for name in dir(each))}
        return {name: self.value(getattr(module, name)) for name in sorted(names) if hasattr(module, name)}

    def value(self, value: Any) -> dict[str, Any]:
        """One object: a class, a function, a part of the library, or something else, of which nothing is asked."""
        if isinstance(value, types.ModuleType):
            return {"module": path_of(value)} if path_of(value).startswith(PACKAGES) else {}
        if isinstance(value, types.FunctionType) and "refused" in vars(value):
            value = refused_class(value.stands_for, value.refused, value.__module__)  # type: ignore[attr-defined]
        if isinstance(value, type) and (
            _is_ours(value) or "refused" in vars(value) or value.__module__.startswith("torch.nn")
        ):
            return {"class": self.cls(value)}
        if callable(value) and _is_ours(value):
            return {"function": getattr(value, "__name__", ""), "call": _call(signature(value))}
        return {}

    def cls(self, cls: type) -> str:
        """The key of a class, which is added with its bases if it is new."""
        key = f"{cls.__module__}.{cls.__qualname__}"
        if self._live.setdefault(key, cls) is not cls:
            key = f"{key} {cls.__name__} {vars(cls).get('refused', '')}"
        if key in self.classes:
            return key
        self._live[key] = cls
        entry: dict[str, Any] = {"name": cls.__name__, "module": cls.__module__}
        self.classes[key] = entry
        if "refused" in vars(cls):
            entry["refused"] = vars(cls)["refused"]
            return key
        entry["bases"] = [self.cls(each) for each in cls.__bases__ if _has_stand_in(each)]
        entry["call"] = _call(signature(cls))
        shown, names = {*dir(cls)}, {*dir(cls), *dir(type(cls))}
        for each in cls.__mro__:
            names |= {*inspect.get_annotations(each), *set_by(each)}
        wrapped = getattr(cls, "of", None)
        if isinstance(wrapped, type):
            entry["of"] = self.cls(wrapped)
            names |= {*dir(wrapped)}
        own = {}
        for name in sorted(names - {*dir(type), *dir(object), "of", "__slots__"}):
            there = member(cls, name)
            if name not in vars(cls) and _inherited(cls, name) == (there, name in shown):
                continue
            if (
                wrapped is not None
                and isinstance(wrapped, type)
                and name not in shown
                and there == member(wrapped, name)
            ):
                continue
            own[name] = self._member(there) | ({} if name in shown else {"shown": False})
        entry["members"] = own
        return key

    def _member(self, there: Member | None) -> dict[str, Any]:
        if there is None:
            return {"raises": True}
        found: dict[str, Any] = {} if there.settable else {"settable": False}
        if there.call is not None:
            found["call"] = _call(there.call)
        if there.type is not None:
            found["type"] = self.cls(there.type)
        return found


def path_of(module: types.ModuleType) -> str:
    """The path that users import a module by."""
    return module.__name__.replace("engine.compat.", "engine.interop.", 1)


def _inherited(cls: type, name: str) -> tuple[Member | None, bool] | None:
    """What the class would have without its own members; ``None``: nothing, or that of a class that has no stand-in."""
    for each in cls.__mro__[1:]:
        if name in vars(each):
            return (member(each, name), True) if _has_stand_in(each) else None
    bases = filter(_has_stand_in, cls.__mro__[1:])
    if any(name in inspect.get_annotations(each) or name in set_by(each) for each in bases):
        return member(cls, name), False
    return None


def _has_stand_in(cls: type) -> bool:
    return _is_ours(cls) or cls.__module__.startswith("torch.")


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(OURS)


def _call(found: inspect.Signature | None) -> list[list[Any]] | None:
    """Name, kind and, if there is one, default of each parameter."""
    if found is None:
        return None
    return [
        [each.name, int(each.kind), *([] if each.default is each.empty else [_literal(each.default)])]
        for each in found.parameters.values()
    ]


def _literal(value: Any) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else NOT_LITERAL


@functools.cache
def _places() -> dict[str, types.ModuleType]:
    """Every dotted name in ``engine.interop`` that stands for a module there."""
    for package in PACKAGES:
        importlib.import_module(package)
    for package, content in Moved.packages.items():
        for found in pkgutil.iter_modules(importlib.import_module(content).__path__):
            importlib.import_module(f"{package}.{found.name}")
    return {
        name: module
        for name, module in sys.modules.items()
        if f"{name}.".startswith(tuple(f"{each}." for each in PACKAGES))
    }


def table() -> str:
    """The text of the file."""
    found = Table()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f'{{"python": "{python}",\n"modules": {{\n{_lines(found.modules)}\n}},\n"classes": {{\n{_lines(found.classes)}\n}}}}\n'


def _lines(entries: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {_entry(entry)}" for key, entry in sorted(entries.items()))


def _entry(entry: dict[str, Any]) -> str:
    """One line for each name and member, so that differences are readable."""
    values = {key: _entry(value) if key == "members" else json.dumps(value) for key, value in entry.items()}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value}" for key, value in values.items()) + "}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(table(), end="")
    else:
        FILE.write_text(table())
