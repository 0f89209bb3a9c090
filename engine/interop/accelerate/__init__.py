"""Accelerate's interface to the engine: change ``accelerate`` to ``engine.interop.accelerate`` in a script's imports."""

from __future__ import annotations

from typing import Any

from engine.interop.accelerate import logging as logging
from engine.interop.accelerate import tracking as tracking
from engine.interop.accelerate import utils as utils
from engine.interop.accelerate.accelerator import Accelerator as Accelerator
from engine.interop.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.interop.accelerate.launchers import debug_launcher as debug_launcher
from engine.interop.accelerate.launchers import notebook_launcher as notebook_launcher
from engine.interop.accelerate.state import AcceleratorState as AcceleratorState
from engine.interop.accelerate.state import GradientState as GradientState
from engine.interop.accelerate.state import PartialState as PartialState


def __getattr__(name: str) -> Any:
    return getattr(utils, name)
