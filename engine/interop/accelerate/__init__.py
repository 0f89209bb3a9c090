"""Accelerate's interface, implemented with the engine: in a script's imports, change ``accelerate`` to ``engine.interop.accelerate``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from engine.compat.accelerate import accelerator as accelerator
from engine.compat.accelerate import big_modeling as big_modeling
from engine.compat.accelerate import data_loader as data_loader
from engine.compat.accelerate import launchers as launchers
from engine.compat.accelerate import local_sgd as local_sgd
from engine.compat.accelerate import logging as logging
from engine.compat.accelerate import optimizer as optimizer
from engine.compat.accelerate import scheduler as scheduler
from engine.compat.accelerate import state as state
from engine.compat.accelerate import tracking as tracking
from engine.compat.accelerate.accelerator import Accelerator as Accelerator
from engine.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.compat.accelerate.launchers import debug_launcher as debug_launcher
from engine.compat.accelerate.launchers import notebook_launcher as notebook_launcher
from engine.compat.accelerate.names import FUNCTIONS, PLACES
from engine.compat.accelerate.state import AcceleratorState as AcceleratorState
from engine.compat.accelerate.state import GradientState as GradientState
from engine.compat.accelerate.state import PartialState as PartialState
from engine.compat.door import Door
from engine.compat.peer_names import PeerNames
from engine.interop import moved
from engine.interop.accelerate import utils as utils

moved(__name__, "engine.compat.accelerate")
_files = [*vars(utils).values(), accelerator, big_modeling, data_loader, launchers, local_sgd, logging, optimizer, scheduler, state, tracking]
_files = [file for file in _files if isinstance(file, ModuleType) and file.__name__.startswith("engine.compat.")]
_door = Door(
    __name__,
    PeerNames("accelerate", Path(accelerator.__file__).with_name("public_names.json")),
    parts=(utils.__name__, *(file.__name__ for file in _files)),
    looked_up=("",),
    by_name=FUNCTIONS,
    by_place=PLACES,
)
sys.meta_path.append(_door)
_door.complete(sys.modules[__name__], "", "utils")
_door.complete(utils, "utils")
for _file in _files:
    _door.complete(_file, _file.__name__.removeprefix("engine.compat.accelerate."))
