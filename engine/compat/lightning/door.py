"""The door by which users import Lightning's names, ``engine.interop.lightning``."""

from __future__ import annotations

from pathlib import Path

from engine.compat.door import Door
from engine.compat.lightning.names import CLASSES, PLACES
from engine.compat.peer_names import PeerNames

_FOLDER = "engine.compat.lightning"
_PARTS = "callbacks module loggers strategies trainer utilities cli tuner"
PACKAGE = "engine.interop.lightning"
DOOR = Door(
    PACKAGE,
    PeerNames("lightning", Path(__file__).with_name("public_names.json")),
    home="pytorch",
    parts=(PACKAGE, *(f"{_FOLDER}.{name}" for name in _PARTS.split())),
    looked_up=("pytorch.", "fabric.utilities.", "fabric.plugins.io.", "lightning_utilities."),
    by_name=CLASSES,
    by_place=PLACES,
)
