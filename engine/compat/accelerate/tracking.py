"""Trackers of an :class:`Accelerator`: loggers of the package ``callbacks``, or the user's own objects."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from callbacks import loggers
from engine.compat.accelerate.state import PartialState
from engine.utils.paths import expanded


class GeneralTracker:
    """The base class of the user's own trackers, which are passed to ``log_with``."""

    name = ""
    requires_logging_directory = False
    main_process_only = True
    tracker: Any = None

    def __init__(self, _blank: bool = False) -> None: ...

    def start(self) -> None: ...
    def store_init_configuration(self, values: dict[str, Any]) -> None: ...
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...
    def finish(self) -> None: ...

    def started_tracker(
        self, project: str, logging_dir: str | Path | None, config: dict[str, Any], options: dict[str, Any]
    ) -> GeneralTracker:
        """Start the tracker for a ``project``, store ``config`` in it, and return it."""
        self.start()
        if config:
            self.store_init_configuration(config)
        return self


class LoggerTracker(GeneralTracker):
    """A tracker that uses a logger of ``callbacks.loggers``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def started_tracker(
        self, project: str, logging_dir: str | Path | None, config: dict[str, Any], options: dict[str, Any]
    ) -> LoggerTracker:
        if self.name == "tensorboard" and logging_dir is None:
            raise ValueError("log_with='tensorboard' needs a folder: give Accelerator(project_dir=...)")
        folder = Path(expanded(logging_dir or ".")) / project
        self.logger = loggers.logger_for(self.name, project, **options)
        self._loop = loggers.LoggedLoop([self.logger], folder, config, is_main_process=PartialState().is_main_process)
        return self

    @property
    def tracker(self) -> Any:
        return getattr(self.logger, "experiment", None) or self.logger

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if kwargs:
            reason = f"has no counterpart; use accelerator.get_tracker({self.name!r}, unwrap=True)"
            raise TypeError(f"log_kwargs of {self.name}: {', '.join(kwargs)} {reason}")
        self._loop(_flat(values), step)

    def finish(self) -> None:
        self._loop.close()


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts; the keys become ``name/inner``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        flat |= {name: value} if inner is None else {f"{name}/{key}": inner_value for key, inner_value in inner.items()}
    return flat


def trackers_for(log_with: Any, logging_dir: Any) -> list[GeneralTracker]:
    """The trackers that ``log_with`` asks for.

    Raises:
        ValueError: an entry has no counterpart.
    """
    trackers: list[GeneralTracker] = []
    for entry in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        name = str(entry).lower()
        if entry is None:
            continue
        if not isinstance(entry, GeneralTracker) and name != "all" and name not in loggers.TRACKERS:
            possible = f"{', '.join(loggers.TRACKERS)}, and objects of subclasses of GeneralTracker"
            raise ValueError(f"log_with={entry!r} has no counterpart; there are {possible}")
        names = (
            [package for package in loggers.TRACKERS if importlib.util.find_spec(package)] if name == "all" else [name]
        )
        trackers += [entry] if isinstance(entry, GeneralTracker) else map(LoggerTracker, names)
    return trackers


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to run on the main process only, unless the tracker has ``main_process_only = False``."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs = not self.main_process_only or PartialState().is_main_process
        return function(self, *args, **kwargs) if runs else None

    return run
