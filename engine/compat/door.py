"""Makes every module and name of another trainer importable from our package of its names: our counterpart, or else a stand-in."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, IntEnum, StrEnum
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import FunctionType, ModuleType, new_class
from typing import Any, Protocol, runtime_checkable

from engine.compat.peer_names import PeerName, PeerNames
from engine.compat.refusals import StandInObject, refused_class, refused_function


class SameModule(Loader):
    """Imports a module under a second name as the same object, so that its classes exist only once. The ``origin`` of a spec is the first name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # exec_module restores it, after the import system has replaced it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class Door(MetaPathFinder, Loader):
    """The modules of ``package``, by which users import another trainer's names.

    A module that we have is imported as usual; :meth:`complete` adds the names that it lacks. A module that we lack is made when it is imported.

    Args:
        package: our package.
        names: the other trainer's names.
        home: the part of the other trainer's package whose modules stand directly in ``package``.
        parts: our modules that have counterparts.
        looked_up: prefixes of the other trainer's modules whose names have the counterparts in ``parts``.
        by_name: name -> what to use instead.
        by_place: prefix of a module -> what to use instead of its names; the longest one counts.
    """

    def __init__(
        self, package: str, names: PeerNames, *, home: str = "", parts: Sequence[str], looked_up: tuple[str, ...],
        by_name: Mapping[str, str], by_place: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.package, self.names, self.home = package, names, home
        self.parts, self.looked_up = parts, looked_up
        self.by_name, self.by_place = by_name, by_place
        self._objects: dict[tuple[str, str, str], Any] = {}
        self._families: list[Callable[[str], Any]] = []
        """The ``__getattr__`` of our modules that make names of one pattern."""

    # -- modules ----------------------------------------------------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = next(self.places(name), None)
        if place is None:
            return None
        usual = self._module_name(place)
        if usual != name:
            return ModuleSpec(name, SameModule(), origin=usual, is_package=True)
        return ModuleSpec(name, self, origin=place, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"Stand-ins for the names of this module of {self.names.package}.")

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        self.complete(module, str(module.__spec__.origin))

    def complete(self, module: ModuleType, *places: str) -> None:
        """Let a module have the names of these modules of the other trainer, too, where it lacks them."""
        vars(module).setdefault("__path__", [])  # so that modules in it are looked for
        if isinstance(vars(module).get("__getattr__"), FunctionType):
            self._families.append(vars(module)["__getattr__"])
        vars(module)["__getattr__"] = partial(self.attribute, module.__name__, places)

    def places(self, name: str) -> Iterator[str]:
        """Yield the other trainer's modules that the module ``name`` of our package stands for."""
        if name != self.package and not name.startswith(f"{self.package}."):
            return
        path = name.removeprefix(self.package).removeprefix(".")
        is_home = not self.home or path == self.home or path.startswith(f"{self.home}.")
        inner = path if is_home else f"{self.home}.{path}".removesuffix(".")
        outer = "" if path == self.home else path  # the package itself stands for both, under either of its names
        yield from (place for place in dict.fromkeys((inner, outer)) if place in self.names.modules)

    def _module_name(self, place: str) -> str:
        path = place.removeprefix(f"{self.home}.") if self.home else place
        return f"{self.package}.{path}" if path and path != self.home else self.package

    # -- names ------------------------------------------------------------------------------------------------------------------

    def attribute(self, module: str, places: Sequence[str], name: str) -> Any:
        """The object that ``module``, which stands for the other trainer's modules ``places``, has under ``name``.

        Raises:
            AttributeError: they have no such name.
        """
        if name == "__all__" and module == self._module_name(places[0]):
            return self.names.public(places[0])
        for place in places:
            inner = f"{place}.{name}" if place else name
            if inner in self.names.modules:
                return importlib.import_module(self._module_name(inner))
            peer = self.names.find(place, name)
            if peer is not None:
                return self.object(peer)
        for family in self._families:
            with suppress(AttributeError):
                return family(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def object(self, name: PeerName) -> Any:
        """Our counterpart of another trainer's object, or a stand-in. Objects of other packages are imported."""
        key = name.kind, name.module, name.name
        if key not in self._objects:
            self._objects[key] = self._counterpart(name)
        return self._objects[key]

    def _counterpart(self, peer: PeerName) -> Any:
        name, module = peer.name, self._module_name(peer.module)
        if peer.kind == "module":
            return importlib.import_module(module if peer.detail else peer.module)
        if peer.module.startswith(self.looked_up) and peer.kind not in ("value", "log"):
            for part in map(importlib.import_module, self.parts):
                if name in vars(part):
                    return vars(part)[name]
            for family in self._families:
                with suppress(AttributeError):
                    return family(name)
        match peer.kind:
            case "foreign":
                return _of_another_package(peer)
            case "value":
                return peer.detail
            case "log":
                return logging.getLogger(module)
            case "type":
                return Any
            case "error":
                return type(name, (resolve_name(f"builtins:{peer.detail}"),), {"__module__": module})
            case "protocol":
                return _protocol(name, peer.detail, module)
            case "enum":
                return _enum(name, peer.detail, module)
            case "function":
                return refused_function(name, self.advice(peer), module)
            case "object":
                return StandInObject(name, self.advice(peer))
        return refused_class(name, self.advice(peer), module)

    def advice(self, name: PeerName) -> str:
        """Say what to use instead of a name that has no counterpart."""
        places = (place for place in self.by_place if f"{name.module}.".startswith(place))
        return self.by_name.get(name.name) or self.by_place[max(places, key=len)]


def _of_another_package(name: PeerName) -> Any:
    try:
        return resolve_name(f"{name.module}:{name.name}")
    except (ImportError, AttributeError):
        return refused_class(name.name, f"it is of the package {name.module.partition('.')[0]}, which is not installed")


def _protocol(name: str, members: str, module: str) -> type[Any]:
    """A protocol with the other trainer's members, for annotations, subclasses and ``isinstance``."""
    words = members.split()
    content: dict[str, Any] = {word.removesuffix("()"): _method for word in words if word.endswith("()")}
    content["__annotations__"] = {word: Any for word in words if not word.endswith("()")}
    content |= {"__module__": module, "__class_getitem__": classmethod(lambda cls, item: cls)}
    bases: tuple[Any, ...] = (Protocol,)
    return runtime_checkable(new_class(name, bases, exec_body=lambda namespace: namespace.update(content)))


def _method(self: Any, *args: Any, **kwargs: Any) -> Any: ...


def _enum(name: str, members: Mapping[str, str | int], module: str) -> type[Enum]:
    base: Any = IntEnum if any(isinstance(value, int) for value in members.values()) else StrEnum
    cls: type[Enum] = base(name, dict(members), module=module)
    return cls
