"""Accelerate's interface, implemented with the engine: in a script's imports, change ``accelerate`` to ``engine.interop.accelerate``."""

from __future__ import annotations

from typing import Any

from engine.compat.accelerate import accelerator as accelerator
from engine.compat.accelerate import data_loader as data_loader
from engine.compat.accelerate import launchers as launchers
from engine.compat.accelerate import logging as logging
from engine.compat.accelerate import optimizer as optimizer
from engine.compat.accelerate import scheduler as scheduler
from engine.compat.accelerate import state as state
from engine.compat.accelerate import tracking as tracking
from engine.compat.accelerate.accelerator import Accelerator as Accelerator
from engine.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.compat.accelerate.launchers import debug_launcher as debug_launcher
from engine.compat.accelerate.launchers import notebook_launcher as notebook_launcher
from engine.compat.accelerate.state import AcceleratorState as AcceleratorState
from engine.compat.accelerate.state import GradientState as GradientState
from engine.compat.accelerate.state import PartialState as PartialState
from engine.interop import moved
from engine.interop.accelerate import utils as utils

moved(__name__, "engine.compat.accelerate")


def __getattr__(name: str) -> Any:
    return getattr(utils, name)
