"""Hooks of Lightning 1.x, which nothing calls: a class that defines one is refused before a run."""

from __future__ import annotations

import inspect
from typing import Any

from engine.compat.lightning.names import REPLACED


def refused_hook(name: str, function: Any) -> str:
    """The hook to define instead of a method of this name; ``""`` if it is not a hook of an earlier version.

    ``on_epoch_start`` and ``on_epoch_end`` took no argument in a module, and two in a callback: with any other number, a class calls its own method.
    """
    if name in ("on_epoch_start", "on_epoch_end"):
        parameters = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
        ]
        if len(parameters) not in (1, 3):  # with self
            return ""
    return REPLACED.get(name, "")


def refuse_replaced(*owners: Any) -> None:
    """Look for hooks that are never called, in a module and callbacks.

    Raises:
        TypeError: an owner defines one; the message says what to define instead.
    """
    for owner in owners:
        classes = getattr(type(owner), "user_classes", type(owner).__mro__)
        methods = {name: method for base in reversed(classes) for name, method in vars(base).items()}
        for name in [name for name in REPLACED if callable(methods.get(name))]:
            if instead := refused_hook(name, methods[name]):
                raise TypeError(f"{type(owner).__name__} defines {name}, which is not called: define {instead}")
