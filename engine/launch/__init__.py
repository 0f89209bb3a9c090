"""Starting the processes of a job: ``fit launch``'s agent, and functions run as ranks (:func:`notebook`, :func:`debug`)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["debug", "notebook"]

if TYPE_CHECKING:
    from engine.launch.functions import debug as debug
    from engine.launch.functions import notebook as notebook


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported on use, because the command line reads its arguments without torch
        return getattr(importlib.import_module("engine.launch.functions"), name)
    raise AttributeError(f"module 'engine.launch' has no attribute {name!r}")
