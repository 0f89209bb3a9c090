"""What settings say together: combinations that cannot work are errors before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from engine import strategies
from engine.config.schema import Settings
from engine.precision import Precision


def check(settings: Settings, origins: Mapping[str, str]) -> None:
    """Make the strategy and the precision that the settings name, and let them judge the rest.

    Raises:
        ValueError, TypeError: a setting of theirs that does not exist or is not possible, or a combination that cannot work.
    """
    Precision.parse(settings.precision)
    if settings.strategy != "auto":
        strategies.get(settings.strategy)
