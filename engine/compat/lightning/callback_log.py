"""``self.log`` and ``self.log_dict`` of callbacks, which are those of the run's module, as in Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.callback import Callback
from engine.compat.lightning.events import Adapter
from engine.compat.lightning.weak_link import WeakLink
from engine.module import TrainModule
from engine.utils.log import warn_once


class ModuleLink(WeakLink[TrainModule]):
    """A callback's reference to the module of the current or latest run."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Call the module's ``log``."""
        self._call("log", args, kwargs)

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Call the module's ``log_dict``."""
        self._call("log_dict", args, kwargs)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = self()
        if module is None:
            warn_once(f"a callback's {method}() outside of a run records nothing")
        else:
            getattr(module, method)(*args, **kwargs)


class Logging:
    """Gives callbacks ``log`` and ``log_dict``."""

    _logs_to = ModuleLink()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log a value as the module's ``log`` does, in each hook in which the module may log."""
        self._logs_to.log(*args, **kwargs)

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Log several values as the module's ``log_dict`` does."""
        self._logs_to.log_dict(*args, **kwargs)


def let_log(callbacks: Sequence[Callback], module: TrainModule) -> None:
    """Let the callbacks that have Lightning's signature log values of ``module``, which begins a run."""
    for callback in callbacks:
        if isinstance(callback, Logging):
            callback._logs_to = ModuleLink(module)
        elif isinstance(callback, Adapter):
            link = ModuleLink(module)
            callback.original.log, callback.original.log_dict = link.log, link.log_dict
