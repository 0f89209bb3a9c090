"""Names of Lightning and Accelerate without a counterpart, of which ``engine.interop`` has stand-ins: what each is, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator

from engine.compat.accelerate.door import DOOR as ACCELERATE
from engine.compat.door import Door
from engine.compat.lightning.door import DOOR as LIGHTNING
from engine.compat.migrate.stand_ins import module
from engine.compat.peer_names import PeerName

DOORS = {
    "lightning.fabric": "engine.interop.lightning.fabric",
    "lightning_fabric": "engine.interop.lightning.fabric",
    "lightning": "engine.interop.lightning",
    "pytorch_lightning": "engine.interop.lightning",
    "accelerate": "engine.interop.accelerate",
}
"""Packages of the libraries -> those that replace them in an import; the first match counts."""
REFUSED = ("class", "function", "object")
"""Kinds of names whose stand-ins raise an error when they are used; others have the value that they have there."""


def has_module(path: str) -> bool:
    """Whether ``engine.interop`` has a module of this path because the other trainer has it."""
    return any(True for _ in _places(path))


def find(path: str, name: str) -> PeerName | None:
    """The name in the other trainer's module that the module ``path`` of ``engine.interop`` stands for; ``None`` if there is none."""
    names = (door.names.find(place, name) for door, place in _places(path))
    return next(filter(None, names), None)


def advice(path: str, name: PeerName) -> str:
    """Say what to use instead of a name that is found in the module ``path`` of ``engine.interop``."""
    door, _ = next(_places(path))
    return door.advice(name)


def door_of(package: str) -> str:
    """The module of ``engine.interop`` that replaces a module of the libraries in an import; empty for other modules."""
    roots = (root for root in DOORS if f"{package}.".startswith(f"{root}."))
    return next((DOORS[root] + package[len(root) :] for root in roots), "")


def is_importable(door: str, name: str = "") -> bool:
    """Whether the module ``door`` of ``engine.interop`` exists, and has ``name``, if one is given, as an attribute or as a module in it."""
    owner = module(door)
    if not name or name == "*":
        return owner is not None or has_module(door)
    if owner is not None and getattr(owner, name, None) is not None:
        return True
    inner = f"{door}.{name}"
    return module(inner) is not None or has_module(inner) or find(door, name) is not None


def _places(path: str) -> Iterator[tuple[Door, str]]:
    """The door of ``path``, and the other trainer's modules that it stands for."""
    return ((door, place) for door in (LIGHTNING, ACCELERATE) for place in door.places(path))
