"""Refuses classes that define hooks of Lightning 1.x, which nothing calls, before a run that would need them starts."""

from __future__ import annotations

import inspect
from typing import Any

from engine.compat.lightning.names import REPLACED


def refused_hook(name: str, function: Any) -> str:
    """Say what to define instead of the method ``name``; an empty string if it is not a hook of an earlier version.

    ``on_epoch_start`` and ``on_epoch_end`` took no argument in a module and two in a callback; with any other number, the class calls it itself.
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


_STAGES = {
    "training": ("fit",),
    "train": ("fit",),
    "pretrain": ("fit",),
    "tbptt": ("fit",),
    "validation": ("fit", "validate"),
    "val": ("fit", "validate"),
    "test": ("test",),
    "predict": ("predict",),
}
"""First word of a hook's name after ``on`` -> the runs in which it would be called; other hooks would be in any."""


def refuse_replaced(stage: str, *owners: Any) -> None:
    """Check a module and callbacks for hooks that are never called, though a run of this ``stage`` would need them.

    Raises:
        TypeError: an owner defines one; the message says what to define instead.
    """
    for owner in owners:
        classes = getattr(type(owner), "user_classes", type(owner).__mro__)
        methods = {name: method for base in reversed(classes) for name, method in vars(base).items()}
        for name in [name for name in REPLACED if callable(methods.get(name)) and _belongs_to(stage, name)]:
            if instead := refused_hook(name, methods[name]):
                raise TypeError(f"{type(owner).__name__} defines {name}, which is not called: define {instead}")


def _belongs_to(stage: str, name: str) -> bool:
    word = name.removeprefix("on_").partition("_")[0]
    return stage in _STAGES.get(word, (stage,))
