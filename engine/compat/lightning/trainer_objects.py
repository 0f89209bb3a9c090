"""The loggers and callbacks of a ``Trainer``, which scripts may exchange or append to between runs."""

from __future__ import annotations

from typing import Any

from engine.callback import Callback
from engine.compat.lightning.adapters import adapt
from engine.compat.lightning.events import original
from engine.compat.lightning.file_loggers import FileLogger
from engine.compat.lightning.loggers import AdaptedLogger, Logger, WrappedLogger
from engine.compat.lightning.trainer_translation import Translated
from engine.loop.run import Run


class TrainerObjects:
    """The loggers and callbacks that a trainer has now."""

    def __init__(self, translation: Translated) -> None:
        self.loggers: list[Any] = translation.loggers
        self.callbacks: list[Any] = translation.callbacks
        self._other_callbacks = translation.other_callbacks
        self._passed: list[tuple[Any, Callback]] = []

    def passed(self) -> list[Callback]:
        """Return what ``Fit`` gets for each object. An object is adapted once, so that its adapter keeps its state from run to run."""
        active = [callback for callback in self.callbacks if not getattr(callback, "idle", False)]
        earlier = {id(entry): adapted for entry, adapted in self._passed}
        loggers = [(entry, earlier.get(id(entry)) or _logger(entry)) for entry in self.loggers]
        callbacks = [(entry, earlier.get(id(entry)) or adapt(entry)) for entry in (*self._other_callbacks, *active)]
        self._passed = [*loggers, *callbacks]
        return [adapted for _, adapted in self._passed]

    def with_those_of_module(self, run: Run) -> list[Any]:
        """The trainer's callbacks and those of the run's module, which replace those of the same classes. Those that save checkpoints come last."""
        of_settings = {id(original(callback)) for callback in run.settings.callbacks}
        of_module = [original(callback) for callback in run.callbacks if id(original(callback)) not in of_settings]
        kinds = {type(callback) for callback in of_module}
        both = [*(callback for callback in self.callbacks if type(callback) not in kinds), *of_module]
        return (
            sorted(both, key=lambda callback: getattr(callback, "is_checkpoint", False))
            if of_module
            else self.callbacks
        )


def _logger(logger: Any) -> Any:
    """The logger to pass to ``Fit``: the one inside a wrapper, one of ours as it is, any other object adapted."""
    if isinstance(logger, (WrappedLogger, FileLogger)):
        return logger.wrapped
    if isinstance(logger, Logger):
        return logger
    adapted = AdaptedLogger(logger)
    adapted.stands_for = logger
    return adapted
