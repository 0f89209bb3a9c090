"""The package ``callbacks`` under a second name, for projects with their own ``callbacks.py``.

``from engine.callbacks import EarlyStopping`` imports the same class as ``from callbacks import EarlyStopping``.
Within ``engine``, only the commands of ``fit`` import this module.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).resolve().parent.parent / "callbacks"


def _is_ours() -> bool:
    """Whether ``import callbacks`` finds the package that is installed with ``engine``."""
    try:
        spec = find_spec("callbacks")
    except ValueError:  # a loaded module named callbacks has no spec
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == _FOLDER


def _load_package() -> ModuleType:
    """Import ``callbacks``, or if a project's own module has that name, load the package under the name of this module."""
    if _is_ours():
        return importlib.import_module("callbacks")
    # Load the package's modules as submodules of engine.callbacks, so that pickles of their classes can be read.
    spec = spec_from_file_location(__name__, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()["__path__"] = module.__path__
    return module


_package = _load_package()
__all__ = list(_package.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_package, name)


def __dir__() -> list[str]:
    return __all__
