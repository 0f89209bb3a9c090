"""Objects of the installed Lightning, as this library's."""

from __future__ import annotations

from typing import Any

from engine.callback import Callback
from engine.interop.lightning.callback import Adapted


def adapted(callback: Any) -> Callback:
    return callback if isinstance(callback, Callback) else Adapted(callback)


def adapt(module: Any) -> Any:
    return module
