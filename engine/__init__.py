"""A PyTorch trainer: ``Fit`` runs the loop, ``Engine`` serves your own loop. Names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "Fit": "engine.fit",
    "TrainModule": "engine.module",
    "DataModule": "engine.data.datamodule",
    "Engine": "engine.engine",
    "CombinedLoader": "engine.data.combined",
    "Loss": "engine.step.gradients",
    "Plan": "engine.planning.plan",
    "Precision": "engine.step.precision",
    "FP8": "engine.transforms.float8",
    "Callback": "engine.callback",
    "Resume": "engine.checkpoint.resume",
    "Run": "engine.loop.run",
    "Result": "engine.loop.state",
    "TrainState": "engine.loop.state",
    "Settings": "engine.config.settings",
    "Strategy": "engine.strategies.base",
    "Single": "engine.strategies.base",
    "DDP": "engine.strategies.ddp",
    "FSDP": "engine.strategies.fsdp",
    "DeepSpeed": "engine.strategies.deepspeed",
    "MeshParallel": "engine.strategies.mesh_parallel",
    "Duration": "engine.config.duration",
    "Every": "engine.config.duration",
    "Environment": "engine.distributed.environments",
    "CheckError": "engine.utils.errors",
    "Device": "engine.utils.device",
    "DamagedCheckpoint": "engine.checkpoint.files",
    "DoesNotFit": "engine.utils.errors",
    "FolderInUse": "engine.utils.errors",
    "HangError": "engine.utils.errors",
    "MismatchError": "engine.utils.errors",
    "RankError": "engine.utils.errors",
    "get_logger": "engine.distributed.rank_work",
    "isolated": "engine.utils.seed",
    "rank_zero_only": "engine.distributed.rank_work",
    "seed_everything": "engine.utils.seed",
    "open_file": "engine.checkpoint.files",
    "serialize_tensors": "engine.checkpoint.tensors",
    "TensorFiles": "engine.checkpoint.tensors",
    "terminal_text": "engine.utils.text",
}
_MODULES = ("launch", "callbacks")
__all__ = ["__version__", "launch", *sorted(_NAMES)]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from engine import callbacks as callbacks
    from engine import launch as launch
    from engine.callback import Callback as Callback
    from engine.checkpoint.files import DamagedCheckpoint as DamagedCheckpoint
    from engine.checkpoint.files import open_file as open_file
    from engine.checkpoint.resume import Resume as Resume
    from engine.checkpoint.tensors import TensorFiles as TensorFiles
    from engine.checkpoint.tensors import serialize_tensors as serialize_tensors
    from engine.config.duration import Duration as Duration
    from engine.config.duration import Every as Every
    from engine.config.settings import Settings as Settings
    from engine.data.combined import CombinedLoader as CombinedLoader
    from engine.data.datamodule import DataModule as DataModule
    from engine.distributed.environments import Environment as Environment
    from engine.distributed.rank_work import get_logger as get_logger
    from engine.distributed.rank_work import rank_zero_only as rank_zero_only
    from engine.engine import Engine as Engine
    from engine.fit import Fit as Fit
    from engine.loop.run import Run as Run
    from engine.loop.state import Result as Result
    from engine.loop.state import TrainState as TrainState
    from engine.module import TrainModule as TrainModule
    from engine.planning.plan import Plan as Plan
    from engine.step.gradients import Loss as Loss
    from engine.step.precision import Precision as Precision
    from engine.strategies.base import Single as Single
    from engine.strategies.base import Strategy as Strategy
    from engine.strategies.ddp import DDP as DDP
    from engine.strategies.deepspeed import DeepSpeed as DeepSpeed
    from engine.strategies.fsdp import FSDP as FSDP
    from engine.strategies.mesh_parallel import MeshParallel as MeshParallel
    from engine.transforms.float8 import FP8 as FP8
    from engine.utils.device import Device as Device
    from engine.utils.errors import CheckError as CheckError
    from engine.utils.errors import DoesNotFit as DoesNotFit
    from engine.utils.errors import FolderInUse as FolderInUse
    from engine.utils.errors import HangError as HangError
    from engine.utils.errors import MismatchError as MismatchError
    from engine.utils.errors import RankError as RankError
    from engine.utils.seed import isolated as isolated
    from engine.utils.seed import seed_everything as seed_everything
    from engine.utils.text import terminal_text as terminal_text


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"engine.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
