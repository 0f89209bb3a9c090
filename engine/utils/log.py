"""The library's logger, and warnings that appear once."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("engine")
"""All of the library's messages go through this logger: configure it like any other ``logging`` logger."""

_said: set[str] = set()


def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Issue a ``UserWarning`` with this text, once per process."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
