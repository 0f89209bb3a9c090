"""Checks of settings together: combinations that cannot work are errors before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine import strategies
from engine.config.masked import readable
from engine.config.named_options import NamedOptions
from engine.config.settings import Settings
from engine.distributed.environments import Environment
from engine.step.precision import Precision
from engine.strategies.base import Strategy


def check(settings: Settings, origins: Mapping[str, str], environment: Environment | None = None) -> None:
    """Create the strategy and the precision that the settings name, and let them check the rest.

    Args:
        environment: this process's rank and world size; ``None``: no process of the job is running yet.

    Raises:
        ValueError, TypeError: an unknown or impossible setting of the two, or a combination that cannot work.
    """
    world_size = _processes(settings, environment)
    try:
        Precision.parse(settings.precision)
        if settings.strategy != "auto":
            strategies.get(settings.strategy).check(settings, origins, world_size)
    except ValueError as error:
        raise ValueError(f"{error}{_origins(str(error), settings, origins)}") from None


def _origins(message: str, settings: Settings, origins: Mapping[str, str]) -> str:
    """The origins of the settings that a message names, except for code, which the traceback shows."""
    if message.startswith(("file ", "environment ", "command line ")):  # it starts with the origin
        return ""
    own = settings.strategy.origins if isinstance(settings.strategy, NamedOptions) else {}
    known = {**origins, **{f"strategy.{key}": origin for key, origin in own.items()}}
    named = set(re.findall(r"\w+(?==)", message)) | ({"devices", "num_nodes"} if "processes" in message else set())
    found = [
        f"{name}: {origin}"
        for name, origin in known.items()
        if name.rpartition(".")[2] in named and origin not in ("code", "default")
    ]
    return f" [{'; '.join(found)}]" if found else ""


def _processes(settings: Settings, environment: Environment | None) -> int | None:
    """The number of processes of the job, if it is known before they start."""
    if environment is not None and environment.name != "single":
        return environment.world_size
    devices = settings.devices
    here = len(devices) if isinstance(devices, tuple) else devices
    return here * settings.num_nodes if isinstance(here, int) else None


def shown(
    settings: Settings, origins: Mapping[str, str], strategy: Strategy | None = None, precision: Precision | None = None
) -> dict[str, dict[str, Any]]:
    """:func:`engine.config.masked.readable`, with all settings of the strategy and the precision; ``None``: those that are named."""
    objects: dict[str, Any] = {"precision": (precision or Precision.parse(settings.precision)).describe()}
    if strategy is not None or settings.strategy != "auto":
        objects["strategy"] = strategies.describe(strategy or strategies.get(settings.strategy), settings.strategy)
    return readable(settings, origins, objects)
