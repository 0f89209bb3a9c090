"""Packages whose names are imported when they are first used. The package's stub is the only list of its names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from (\.\S*) import (\w+) as (\w+)$", re.MULTILINE)


def lazy_names(
    package: str, file: str, hidden: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package, made from the imports in the stub beside its ``__init__.py``::

        __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

    Type checkers and editors read the same stub. Its lines are ``from .early_stopping import EarlyStopping as EarlyStopping`` for a name, and
    ``from . import launch as launch`` for a module. Imports are relative, because ``callbacks`` may be loaded as ``engine.callbacks``.

    Args:
        package: the package's ``__name__``.
        file: the package's ``__file__``.
        hidden: names to leave out of ``__all__``.
    """
    text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    sources = {name: (module, source) for module, source, name in _IMPORT.findall(text)}
    public = sorted(sources.keys() - set(hidden))

    def __getattr__(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(public)}")
        module, source = sources[name]
        if module == ".":
            value: Any = importlib.import_module(f".{source}", package)
        else:
            value = getattr(importlib.import_module(module, package), source)
        setattr(sys.modules[package], name, value)  # from now on Python finds the name without this function
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return __getattr__, __dir__, public
