"""Counterparts of Lightning's and Accelerate's names: an object of ``engine``, one of ``engine.interop``, or advice."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from engine.compat.accelerate import names as accelerate
from engine.compat.lightning import names as lightning
from engine.compat.migrate import peers
from engine.compat.migrate.imports import TRANSFORMERS, Api, library_name
from engine.compat.migrate.stand_ins import module, stand_in
from engine.compat.transformers.names import sentence_for

AS_IS, INTEROP, CHANGE = "as is", "interop", "change"
"""The verdicts, from the best to the worst: works with ``engine``, works through ``engine.interop``, needs a change."""
INTEROP_PACKAGES = {
    **dict.fromkeys(("lightning", "fabric"), "engine.interop.lightning"),
    "accelerate": "engine.interop.accelerate",
}
_INTEROP_OF = INTEROP_PACKAGES | {"fabric": "engine.interop.lightning.fabric"}
RENAMED = lightning.RENAMED | accelerate.RENAMED
"""The libraries' names of classes and functions -> the names in ``engine``."""


@dataclass(frozen=True)
class Counterpart:
    """The counterpart of a library's name: its objects in ``engine`` and ``engine.interop``, if there are any.

    ``sentence``: where the counterpart is, or what to do if there is none. ``refused``: what to do instead of instantiating the
    counterpart, if it is a class that can only be imported.
    """

    verdict: str
    sentence: str
    engine_object: Any = None
    interop_object: Any = None
    refused: str = ""


@functools.cache
def counterpart(api: Api) -> Counterpart:
    """Find the counterpart of a library's class or function."""
    if api.library == TRANSFORMERS:
        return Counterpart(CHANGE, sentence_for(api.name))
    engine_object, engine_path = find_in_engine(api)
    interop_object, interop_path = find_in_interop(api)
    if (
        api.library == "lightning"
        and api.path.startswith("callbacks.")
        and api.name in lightning.BOUND
        and interop_object is not None
    ):
        return Counterpart(
            INTEROP, f"{interop_path}, or {lightning.BOUND[api.name]}", None, interop_object, refused(interop_object)
        )
    if engine_object is not None:
        instead = refused(interop_object) if interop_object is not None else _stand_in(api)[1]
        return Counterpart(AS_IS, engine_path, engine_object, interop_object, instead)
    if interop_object is not None:
        return Counterpart(INTEROP, interop_path, None, interop_object, refused(interop_object))
    path, instead = _stand_in(api)
    if path:
        return Counterpart(INTEROP, path, refused=instead)
    part = api.path.split(".")[0]
    sentence = (
        "it is private there"
        if api.name.startswith("_")
        else f"{INTEROP_PACKAGES[api.library]} has nothing of this name"
    )
    return Counterpart(CHANGE, lightning.PARTS.get(part, sentence))


def _stand_in(api: Api) -> tuple[str, str]:
    """The path of the stand-in for a library's name, and what to use instead if it raises an error when it is used; empty if there is none."""
    package = ".".join(filter(None, (_INTEROP_OF[api.library], api.path.rpartition(".")[0])))
    name = peers.find(package, api.name)
    if name is None:
        return "", ""
    return f"{package}.{api.name}", peers.advice(package, name).rstrip(".") if name.kind in peers.REFUSED else ""


def refused(counterpart: object) -> str:
    """Say what to do instead of instantiating a class that can only be imported; empty for every other object."""
    return str(vars(counterpart).get("refused", "")).rstrip(".") if inspect.isclass(counterpart) else ""


@functools.cache
def is_package(api: Api) -> bool:
    """Whether the name is only a package or a module of the library, whose use alone needs no verdict."""
    if api.library != TRANSFORMERS and (not api.path or api.name.islower()):
        value = find_in_interop(api)[0]
        return isinstance(value, ModuleType) or (value is None and (not api.path or api.path in lightning.SAME_PARTS))
    return False


@functools.cache
def failed_import(package: str, name: str = "") -> str:
    """Say why ``from package import name``, or ``import package`` without a ``name``, fails once it names ``engine.interop``, and what to do.

    An empty string if it works, or if the package is none of the libraries'.
    """
    door = peers.door_of(package)
    if not door or peers.is_importable(door, name):
        return ""
    api = library_name(f"{package}.{name}".rstrip("."))
    assert api is not None
    value, path = find_in_interop(api)
    if value is not None and "." in path.removeprefix(INTEROP_PACKAGES[api.library]):
        return f"{path} has it" if name else f"import from {path.rpartition('.')[0]}"
    match = counterpart(api)
    missing = f"{door} has no {name!r}" if name and peers.is_importable(door) else f"there is no module {door}"
    return f"{missing}: {match.sentence}" if match.sentence.partition(" ")[0] != missing.partition(" ")[0] else missing


def find_in_engine(api: Api) -> tuple[Any, str]:
    """Find the counterpart of the name in ``engine`` or ``callbacks``; return the object and its dotted path, or ``(None, "")``."""
    head, _, name = api.path.rpartition(".")
    if name in RENAMED:
        return stand_in(f"engine.{RENAMED[name]}"), f"engine.{RENAMED[name]}"
    package = lightning.SAME_PARTS.get(head.split(".")[0]) if api.library == "lightning" else None
    if package is not None:
        owner = module(package)
        if name in getattr(owner, "__all__", ()):
            return getattr(owner, name), f"{package}.{name}"
    return None, ""


def find_in_interop(api: Api) -> tuple[Any, str]:
    """Find the counterpart of the name in ``engine.interop``; return the object and its dotted path, or ``(None, "")``."""
    package = INTEROP_PACKAGES[api.library]
    *head, name = api.path.split(".")
    for length in range(len(head), -1, -1):  # the module of the same path first, then its parents
        place = ".".join([package, *head[:length]])
        owner = module(place)
        value = None if owner is None else getattr(owner, name, None) if name else owner
        if value is None and owner is not None:
            value = module(f"{place}.{name}")
        if value is not None:
            return value, f"{place}.{name}" if name else place
    return None, ""
