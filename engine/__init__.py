"""A PyTorch trainer: ``Fit`` runs the loop, ``Engine`` serves those who keep their own. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "Fit": "engine.fit",
    "TrainModule": "engine.module",
    "DataModule": "engine.datamodule",
    "Engine": "engine.engine",
    "CombinedLoader": "engine.data.combined",
    "Loss": "engine.gradients",
    "Precision": "engine.precision",
    "FP8": "engine.transforms.float8",
    "Callback": "engine.callback",
    "Resume": "engine.loading",
    "Run": "engine.run",
    "Result": "engine.result",
    "TrainState": "engine.result",
    "Strategy": "engine.strategies.base",
    "Single": "engine.strategies.base",
    "DDP": "engine.strategies.ddp",
    "FSDP": "engine.strategies.fsdp",
    "DeepSpeed": "engine.strategies.deepspeed",
    "MeshParallel": "engine.strategies.mesh_parallel",
    "Duration": "engine.config.duration",
    "Every": "engine.config.duration",
    "CheckError": "engine.errors",
    "FolderInUse": "engine.errors",
    "HangError": "engine.errors",
    "MismatchError": "engine.errors",
    "RankError": "engine.errors",
    "seed_everything": "engine.seed",
}
__all__ = ["__version__", "launch", *sorted(_NAMES)]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from engine import launch as launch
    from engine.callback import Callback as Callback
    from engine.config.duration import Duration as Duration
    from engine.config.duration import Every as Every
    from engine.data.combined import CombinedLoader as CombinedLoader
    from engine.datamodule import DataModule as DataModule
    from engine.engine import Engine as Engine
    from engine.errors import CheckError as CheckError
    from engine.errors import FolderInUse as FolderInUse
    from engine.errors import HangError as HangError
    from engine.errors import MismatchError as MismatchError
    from engine.errors import RankError as RankError
    from engine.fit import Fit as Fit
    from engine.gradients import Loss as Loss
    from engine.loading import Resume as Resume
    from engine.module import TrainModule as TrainModule
    from engine.precision import Precision as Precision
    from engine.result import Result as Result
    from engine.result import TrainState as TrainState
    from engine.run import Run as Run
    from engine.seed import seed_everything as seed_everything
    from engine.strategies.base import Single as Single
    from engine.strategies.base import Strategy as Strategy
    from engine.strategies.ddp import DDP as DDP
    from engine.strategies.deepspeed import DeepSpeed as DeepSpeed
    from engine.strategies.fsdp import FSDP as FSDP
    from engine.strategies.mesh_parallel import MeshParallel as MeshParallel
    from engine.transforms.float8 import FP8 as FP8


def __getattr__(name: str) -> Any:
    if name == "launch":
        return importlib.import_module("engine.launch")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
