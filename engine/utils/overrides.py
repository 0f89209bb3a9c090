"""Whether a method of a base class is overridden."""

from __future__ import annotations

from typing import Any


def overridden(owner: Any, name: str, base: type) -> bool:
    """Whether ``owner`` has a method of this name that is not ``base``'s, from its class or set on the object."""
    method = getattr(owner, name, None)
    return callable(method) and getattr(method, "__func__", method) is not getattr(base, name, None)
