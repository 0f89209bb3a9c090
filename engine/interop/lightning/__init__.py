"""Lightning's names implemented with this library: a Lightning project runs after changing its import to ``import engine.interop.lightning as L``.

Submodules have Lightning's paths (``callbacks.early_stopping``, ``utilities.types``, ``pytorch.trainer.states``); several paths may refer to the same
file of :mod:`engine.compat.lightning`.
"""

from __future__ import annotations

import sys

from engine.compat.lightning import callbacks as callbacks
from engine.compat.lightning import cli as cli
from engine.compat.lightning import loggers as loggers
from engine.compat.lightning import module as core  # noqa: F401
from engine.compat.lightning import strategies as strategies
from engine.compat.lightning import trainer as trainer
from engine.compat.lightning import tuner as tuner
from engine.compat.lightning import utilities as utilities
from engine.compat.lightning.adapters import adapt as adapt
from engine.compat.lightning.callback import Callback as Callback
from engine.compat.lightning.door import DOOR as _door
from engine.compat.lightning.module import LightningDataModule as LightningDataModule
from engine.compat.lightning.module import LightningModule as LightningModule
from engine.compat.lightning.names import MODULES
from engine.compat.lightning.trainer import Trainer as Trainer
from engine.compat.lightning.utilities import seed_everything as seed_everything
from engine.data.combined import CombinedLoader as CombinedLoader
from engine.interop import moved

pytorch = sys.modules[__name__]
profilers = serve = callbacks
accelerators = loops = plugins = utilities
moved(__name__, "engine.compat.lightning")
sys.meta_path.append(_door)
_door.complete(pytorch, "pytorch", "")
sys.modules[f"{__name__}.pytorch"] = pytorch
for _part, _paths in MODULES.items():
    _file = globals()[_part]
    for _class in vars(_file).values():
        if isinstance(_class, type) and _class.__module__ == _file.__name__:
            _class.__module__ = (
                f"{__name__}.{_part}"  # so that saved settings and messages name the path that users import
            )
    _door.complete(_file, *(f"pytorch.{path}" for path in _paths.split()))
    for _path in _paths.split():
        sys.modules[f"{__name__}.{_path}"] = sys.modules[f"{__name__}.pytorch.{_path}"] = _file
