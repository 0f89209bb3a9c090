"""Objects of the installed Lightning, as this library's."""

from __future__ import annotations

from typing import Any

from engine.callback import Callback
from engine.interop.lightning.callback import Adapted


def callback_of(callback: Any) -> Callback:
    """x"""
    return callback if isinstance(callback, Callback) else Adapted(callback)


def adapted(module: Any) -> Any:
    """x"""
    return module


adapt = adapted
