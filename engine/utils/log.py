"""The library's logger, and warnings that are worth saying once."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("engine")
"""Everything the library reports goes through here: configure it as any other ``logging`` logger."""

_said: set[str] = set()


def warn_once(message: str, *, stacklevel: int = 3) -> None:
    """Raise a ``UserWarning`` with this text, once in the life of the process."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
