"""Finds the methods of a base class that an object overrides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def overridden(owner: Any, name: str, base: type) -> bool:
    """Whether ``owner`` has a method of this name that is not ``base``'s, from its class or set on the object."""
    return name in overridden_methods(owner, (name,), base)


def overridden_methods(owner: Any, names: Iterable[str], base: type) -> frozenset[str]:
    """The subset of ``names`` for which ``owner`` has a method that is not ``base``'s, from its class or set on the object."""
    methods = [(name, getattr(owner, name, None)) for name in names]
    return frozenset(
        [name for name, m in methods if callable(m) and getattr(m, "__func__", m) is not getattr(base, name, None)]
    )
