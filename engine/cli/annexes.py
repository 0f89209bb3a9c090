"""Imports modules from the parts of the library that may be left out of an installation, when an option needs them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from engine.cli.terminal import UsageError


def annex(name: str) -> ModuleType:
    """Import and return the module ``name`` of a part of the library that may be left out of an installation, such as ``engine.compat``.

    Raises:
        UsageError: this installation lacks that part.
    """
    package = ".".join(name.split(".")[:2])
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"this installation has no {package}")
    return importlib.import_module(name)
