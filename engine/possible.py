"""What settings say together: combinations that cannot work are errors before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine import strategies
from engine.config.readable import readable
from engine.config.schema import Settings
from engine.precision import Precision
from engine.strategies.base import Strategy


def check(settings: Settings, origins: Mapping[str, str]) -> None:
    """Make the strategy and the precision that the settings name, and let them judge the rest.

    Raises:
        ValueError, TypeError: a setting of theirs that does not exist or is not possible, or a combination that cannot work.
    """
    Precision.parse(settings.precision)
    if settings.strategy != "auto":
        strategies.get(settings.strategy)


def shown(
    settings: Settings, origins: Mapping[str, str], strategy: Strategy | None = None, precision: Precision | None = None
) -> dict[str, dict[str, Any]]:
    """:func:`engine.config.readable.readable`, with all settings of the strategy and the precision; ``None``: those that are named."""
    objects: dict[str, Any] = {"precision": (precision or Precision.parse(settings.precision)).describe()}
    if strategy is not None or settings.strategy != "auto":
        objects["strategy"] = strategies.describe(strategy or strategies.get(settings.strategy), settings.strategy)
    return readable(settings, origins, objects)
