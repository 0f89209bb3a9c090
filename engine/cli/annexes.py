"""Modules of annexes, which an installation may lack: imported when an option needs them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from engine.cli.terminal import UsageError


def annex(name: str) -> ModuleType:
    """The module ``name`` of an annex.

    Raises:
        UsageError: this installation has no such annex.
    """
    package = ".".join(name.split(".")[:2])
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"this installation has no {package}")
    return importlib.import_module(name)
