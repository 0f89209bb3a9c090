"""Accelerate's launchers, which run a function in several processes, the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.launch import functions

_NEUTRAL = (None, 0, 1, "", "static", "127.0.0.1")
"""Values of unsupported arguments that are accepted, because they are defaults or have no effect."""


def _call(function: Callable[..., Any], args: tuple[Any, ...], mixed_precision: str) -> Any:
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    return function(*args)


def notebook_launcher(
    function: Any, args: Any = (), num_processes: int | None = None, mixed_precision: str = "no", use_port: Any = None, **further_arguments: Any
) -> list[Any]:  # fmt: skip
    """Run a function on several ranks; see :func:`engine.launch.notebook`, which finds a free port.

    Raises:
        ValueError: several machines, restarts, or an argument without a counterpart.
    """
    if refused := {name: value for name, value in further_arguments.items() if value not in _NEUTRAL}:
        reason = "has no counterpart; use fit launch for several machines and restarts"
        raise ValueError(f"notebook_launcher({refused}) {reason}")
    return functions.notebook(partial(_call, function, tuple(args), mixed_precision), num_processes=num_processes)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> list[Any]:
    """Run ``function(*args)`` in ``num_processes`` processes on the CPU; return their results by rank."""
    return functions.debug(function, *args, num_processes=num_processes)
