"""What a run of N ranks needs before it is started: memory, communication and time, traced on one machine with no data in memory.

What plans is imported when a plan is made: it takes a second.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "cluster_of": "engine.planning.devices",
    "job_set_aside": "engine.planning.torch_private",
    "planned": "engine.planning.planned_run",
    "search_plans": "engine.planning.search_run",
}

__all__ = ["cluster_of", "job_set_aside", "planned", "search_plans"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'engine.planning' has no attribute {name!r}")
