"""The door by which users import Accelerate's names, ``engine.interop.accelerate``."""

from __future__ import annotations

from pathlib import Path

from engine.compat.accelerate.names import FUNCTIONS, PLACES
from engine.compat.door import Door
from engine.compat.peer_names import PeerNames

_FOLDER = "engine.compat.accelerate"
PACKAGE = "engine.interop.accelerate"
_MODULES = "accelerator big_modeling data_loader hooks launchers local_sgd logging optimizer scheduler state tracking"
_OF_UTILS = "dataclasses environment imports memory modeling operations other random tqdm versions"
MODULES = (*_MODULES.split(), *(f"utils.{name}" for name in _OF_UTILS.split()))
"""Accelerate's modules that are here."""
DOOR = Door(
    PACKAGE,
    PeerNames("accelerate", Path(__file__).with_name("public_names.json")),
    parts=(f"{PACKAGE}.utils", *(f"{_FOLDER}.{name}" for name in MODULES)),
    looked_up=("",),
    by_name=FUNCTIONS,
    by_place=PLACES,
)
