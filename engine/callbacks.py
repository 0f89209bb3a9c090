"""The package ``callbacks`` under a second name, for projects with their own ``callbacks.py``.

``from engine.callbacks import EarlyStopping`` imports the same class as ``from callbacks import EarlyStopping``.
In ``engine`` only commands of ``fit`` import this module.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callbacks import EMA as EMA
    from callbacks import SWA as SWA
    from callbacks import AimLogger as AimLogger
    from callbacks import BackboneFinetuning as BackboneFinetuning
    from callbacks import BaseFinetuning as BaseFinetuning
    from callbacks import BasePredictionWriter as BasePredictionWriter
    from callbacks import BatchValidation as BatchValidation
    from callbacks import CSVLogger as CSVLogger
    from callbacks import DeviceStatsMonitor as DeviceStatsMonitor
    from callbacks import EarlyStopping as EarlyStopping
    from callbacks import GradientNorm as GradientNorm
    from callbacks import JSONLLogger as JSONLLogger
    from callbacks import LambdaCallback as LambdaCallback
    from callbacks import LearningRateMonitor as LearningRateMonitor
    from callbacks import MLflowLogger as MLflowLogger
    from callbacks import ModelCheckpoint as ModelCheckpoint
    from callbacks import ModelSummary as ModelSummary
    from callbacks import PredictionWriter as PredictionWriter
    from callbacks import Profiler as Profiler
    from callbacks import Pruning as Pruning
    from callbacks import ReplicaCheck as ReplicaCheck
    from callbacks import Report as Report
    from callbacks import RichProgressBar as RichProgressBar
    from callbacks import ServableModule as ServableModule
    from callbacks import ServableModuleValidator as ServableModuleValidator
    from callbacks import SimpleProfiler as SimpleProfiler
    from callbacks import SpikeGuard as SpikeGuard
    from callbacks import StragglerMonitor as StragglerMonitor
    from callbacks import TensorBoardLogger as TensorBoardLogger
    from callbacks import ThroughputMonitor as ThroughputMonitor
    from callbacks import TQDMProgressBar as TQDMProgressBar
    from callbacks import TrackioLogger as TrackioLogger
    from callbacks import WandbLogger as WandbLogger
    from callbacks import WeightAveraging as WeightAveraging
    from callbacks import find_batch_size as find_batch_size
    from callbacks import find_lr as find_lr
    from callbacks import read_predictions as read_predictions
    from callbacks import write_report as write_report

_FOLDER = Path(__file__).resolve().parent.parent / "callbacks"


def _is_ours() -> bool:
    """Whether ``import callbacks`` finds the package installed with this one."""
    try:
        spec = find_spec("callbacks")
    except ValueError:  # a module without a spec has the name
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == _FOLDER


def _loaded() -> ModuleType:
    if _is_ours():
        return importlib.import_module("callbacks")
    # Then its modules are found below this one, so that pickles of their classes can be read.
    spec = spec_from_file_location(__name__, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()["__path__"] = module.__path__
    return module


_package = _loaded()
__all__ = list(_package.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_package, name)


def __dir__() -> list[str]:
    return __all__
