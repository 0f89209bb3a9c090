"""Finds the methods of a base class that an object overrides."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import FunctionType, MethodType
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


def use_base_methods(owner: Any, base: type) -> dict[str, bool]:
    """Give ``owner`` the methods of ``base`` that it or its class sets to ``None``, which says that they are not overridden.

    Returns:
        The names, and whether the object itself had ``None`` there; for :func:`set_to_none`.
    """
    methods = _methods(base)
    places = (owner, *type(owner).__mro__[: type(owner).__mro__.index(base)])
    none_names = {name for place in places for name, value in vars(place).items() if value is None and name in methods}
    names = {}
    for name in none_names:
        if getattr(owner, name) is None:
            names[name] = name in vars(owner)
            vars(owner)[name] = MethodType(methods[name], owner)
    return names


@functools.cache
def _methods(base: type) -> dict[str, FunctionType]:
    return {name: method for name, method in vars(base).items() if isinstance(method, FunctionType)}


def set_to_none(owner: Any, names: dict[str, bool]) -> None:
    """Undo :func:`use_base_methods`, which has returned ``names``."""
    for name, on_object in names.items():
        vars(owner).pop(name, None)
        if on_object:
            vars(owner)[name] = None
