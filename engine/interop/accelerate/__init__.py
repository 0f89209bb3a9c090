"""Accelerate's interface, implemented with the engine: in a script's imports, change ``accelerate`` to ``engine.interop.accelerate``."""

from __future__ import annotations

import sys
from importlib import import_module

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
from engine.compat.accelerate.door import DOOR as _door
from engine.compat.accelerate.door import MODULES
from engine.compat.accelerate.installation import install as install
from engine.compat.accelerate.launchers import debug_launcher as debug_launcher
from engine.compat.accelerate.launchers import notebook_launcher as notebook_launcher
from engine.compat.accelerate.state import AcceleratorState as AcceleratorState
from engine.compat.accelerate.state import GradientState as GradientState
from engine.compat.accelerate.state import PartialState as PartialState
from engine.compat.accelerate.utils.modeling import load_checkpoint_in_model as load_checkpoint_in_model
from engine.interop import moved
from engine.interop.accelerate import utils as utils

moved(__name__, "engine.compat.accelerate")
sys.meta_path.append(_door)
_door.complete(sys.modules[__name__], "", "utils")
_door.complete(utils, "utils")
for _name in MODULES:
    _door.complete(import_module(f"engine.compat.accelerate.{_name}"), _name)
