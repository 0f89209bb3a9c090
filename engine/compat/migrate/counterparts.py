"""Counterparts of Lightning's and Accelerate's names: a name of ``engine``, one of ``engine.interop``, or an answer."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from engine.compat.accelerate import names as accelerate
from engine.compat.lightning import names as lightning
from engine.compat.migrate.imports import Api
from engine.compat.migrate.stand_ins import module, stand_in

AS_IS, INTEROP, CHANGE = "as is", "interop", "change"
"""The verdicts, from the best to the worst: works with ``engine``, works through ``engine.interop``, needs a change."""
INTEROP_OF = {
    **dict.fromkeys(("lightning", "fabric"), "engine.interop.lightning"),
    "accelerate": "engine.interop.accelerate",
}
RENAMED = lightning.RENAMED | accelerate.RENAMED
"""Names of the libraries, and what ``engine`` has in their place."""


@dataclass(frozen=True)
class Counterpart:
    """The counterpart of a name: ``where`` it is, and the object, if there is one.

    ``refused``: what to do instead of making an object of a class that can only be named.
    """

    verdict: str
    where: str
    plain: Any = None
    translated: Any = None
    refused: str = ""


@functools.cache
def counterpart(api: Api) -> Counterpart:
    """Find what stands for a class or a function of the libraries."""
    plain, where = plain_counterpart(api)
    drop_in, place = translated(api)
    if (
        api.library == "lightning"
        and api.path.startswith("callbacks.")
        and api.name in lightning.BOUND
        and drop_in is not None
    ):
        return Counterpart(INTEROP, f"{place}, or {lightning.BOUND[api.name]}", None, drop_in, refused(drop_in))
    if plain is not None:
        return Counterpart(AS_IS, where, plain, drop_in)
    if drop_in is not None:
        return Counterpart(INTEROP, place, None, drop_in, refused(drop_in))
    part = api.path.split(".")[0]
    sentence = (
        "it is private there" if api.name.startswith("_") else f"{INTEROP_OF[api.library]} has nothing of this name"
    )
    return Counterpart(CHANGE, lightning.PARTS.get(part, sentence))


def refused(counterpart: object) -> str:
    """The sentence about a class that can only be named, not made; empty for every other object."""
    return str(vars(counterpart).get("refused", "")).rstrip(".") if inspect.isclass(counterpart) else ""


@functools.cache
def is_package(api: Api) -> bool:
    """Tell whether the name is only a part of the library, which says nothing by itself."""
    if not api.path or api.name.islower():
        value = translated(api)[0]
        return isinstance(value, ModuleType) or (value is None and (not api.path or api.path in lightning.SAME_PARTS))
    return False


def plain_counterpart(api: Api) -> tuple[Any, str]:
    """Find the object of ``engine`` or ``callbacks`` that stands for the name, and where it is."""
    head, _, name = api.path.rpartition(".")
    if name in RENAMED:
        return stand_in(f"engine.{RENAMED[name]}"), f"engine.{RENAMED[name]}"
    package = lightning.SAME_PARTS.get(head.split(".")[0]) if api.library == "lightning" else None
    if package is not None:
        owner = module(package)
        if name in getattr(owner, "__all__", ()):
            return getattr(owner, name), f"{package}.{name}"
    return None, ""


def translated(api: Api) -> tuple[Any, str]:
    """Find the object of the name in ``engine.interop``, and where it is."""
    package = INTEROP_OF[api.library]
    *head, name = api.path.split(".")
    for length in range(len(head), -1, -1):  # its own place first, then a shorter one
        place = ".".join([package, *head[:length]])
        owner = module(place)
        value = None if owner is None else getattr(owner, name, None) if name else owner
        if value is None and owner is not None:
            value = module(f"{place}.{name}")
        if value is not None:
            return value, f"{place}.{name}" if name else place
    return None, ""
