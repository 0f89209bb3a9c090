"""Names of Lightning and Accelerate without a counterpart, of which ``engine.interop`` has stand-ins: what each is, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.compat.accelerate import names as accelerate
from engine.compat.lightning import names as lightning
from engine.compat.peer_names import PeerName, PeerNames

_COMPAT = Path(__file__).resolve().parents[1]
_LIGHTNING, _ACCELERATE = "engine.interop.lightning", "engine.interop.accelerate"
_PEERS = {
    _LIGHTNING: PeerNames("lightning", _COMPAT / "lightning" / "public_names.json"),
    _ACCELERATE: PeerNames("accelerate", _COMPAT / "accelerate" / "public_names.json"),
}
_BY_NAME = {_LIGHTNING: lightning.CLASSES, _ACCELERATE: accelerate.FUNCTIONS}
_BY_PLACE = {_LIGHTNING: lightning.PLACES, _ACCELERATE: accelerate.PLACES}
REFUSED = ("class", "function", "object")
"""Kinds of names whose stand-ins raise an error when they are used; others have the value that they have there."""


def has_module(path: str) -> bool:
    """Whether ``engine.interop`` has a module of this path because the other trainer has it."""
    return any(True for _ in _places(path))


def find(path: str, name: str) -> PeerName | None:
    """The name in the other trainer's module that the module ``path`` of ``engine.interop`` stands for; ``None`` if there is none."""
    for peers, place in _places(path):
        if (peer_name := peers.find(place, name)) is not None:
            return peer_name
    return None


def advice(path: str, name: PeerName) -> str:
    """Say what to use instead of a name that is found in the module ``path`` of ``engine.interop``."""
    package = _package(path)
    places = (place for place in _BY_PLACE[package] if f"{name.module}.".startswith(place))
    return _BY_NAME[package].get(name.name) or _BY_PLACE[package][max(places, key=len)]


def _package(path: str) -> str:
    return _ACCELERATE if f"{path}.".startswith(f"{_ACCELERATE}.") else _LIGHTNING


def _places(path: str) -> Iterator[tuple[PeerNames, str]]:
    """The other trainer's modules that ``path`` may stand for: ``lightning.pytorch``'s modules stand directly in our package, too."""
    package = _package(path)
    inner = path.removeprefix(package).lstrip(".")
    places = [inner]
    if package == _LIGHTNING:
        places = [*(("pytorch", "") if inner in ("pytorch", "") else (f"pytorch.{inner}", inner))]
    for place in places:
        if place in _PEERS[package].modules:
            yield _PEERS[package], place
