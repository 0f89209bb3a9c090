"""Lightning's names over this library: ``import engine.interop.lightning as L``, and a Lightning project runs.

Submodules have Lightning's paths (``callbacks.early_stopping``, ``utilities.types``, ``pytorch.trainer.states``); several of them are one file here.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from engine.config.lightning_names import MODULES
from engine.data.combined_loaders import CombinedLoader as CombinedLoader
from engine.interop.lightning import callbacks as callbacks
from engine.interop.lightning import cli as cli
from engine.interop.lightning import loggers as loggers
from engine.interop.lightning import module as core  # noqa: F401
from engine.interop.lightning import strategies as strategies
from engine.interop.lightning import trainer as trainer
from engine.interop.lightning import utilities as utilities
from engine.interop.lightning.callback import Callback as Callback
from engine.interop.lightning.foreign import adapt as adapt
from engine.interop.lightning.module import LightningDataModule as LightningDataModule
from engine.interop.lightning.module import LightningModule as LightningModule
from engine.interop.lightning.trainer import Trainer as Trainer
from engine.interop.lightning.utilities import seed_everything as seed_everything

pytorch = sys.modules[__name__]
profilers = serve = callbacks
tuner = accelerators = loops = plugins = utilities
_ELSEWHERE = {"Fabric": ": use engine.Engine"}
sys.modules[f"{__name__}.pytorch"] = pytorch
for _part, _paths in MODULES.items():
    _file = globals()[_part]
    for _path in _paths.split():
        sys.modules[f"{__name__}.{_path}"] = sys.modules[f"{__name__}.pytorch.{_path}"] = _file


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_ELSEWHERE.get(name, '')}")
