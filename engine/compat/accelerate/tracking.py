"""Trackers of an :class:`Accelerator`: loggers of the package ``callbacks``, or the user's own objects."""

from __future__ import annotations

import functools
import importlib.util
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from callbacks import loggers
from engine.compat.accelerate.state import PartialState
from engine.loop.run import Run
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
    """A tracker that uses the logger of ``callbacks.loggers`` that has its ``name``.

    Args:
        run_name: the project; by default that of ``init_trackers``.
        logging_dir: a folder of files goes into it; by default that of the ``Accelerator``.
        options: the logger's arguments.
    """

    def __init__(self, run_name: str | None = None, logging_dir: str | Path | None = None, **options: Any) -> None:
        self.run_name, self.logging_dir, self.options = run_name, logging_dir, options
        self._config: dict[str, Any] = {}
        self._loop: loggers.LoggedLoop | None = None

    def started_tracker(
        self, project: str, logging_dir: str | Path | None, config: dict[str, Any], options: dict[str, Any]
    ) -> LoggerTracker:
        self.run_name, self.logging_dir = self.run_name or project, self.logging_dir or logging_dir
        self.options |= options
        if self.requires_logging_directory and self.logging_dir is None:
            raise ValueError(f"log_with={self.name!r} needs a folder: give Accelerator(project_dir=...)")
        self._config |= config
        self._open()
        return self

    def start(self) -> None:
        """Do nothing: the logger starts with the first values, or when it is asked for, because it needs the configuration."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self._loop is not None and values:
            raise ValueError(
                f"{type(self).__name__}.store_init_configuration comes after values were logged: call it before"
            )
        self._config |= values

    def _open(self) -> loggers.LoggedLoop:
        if self._loop is None:
            is_main, project = PartialState().is_main_process, self.run_name or ""
            folder = Path(expanded(self.logging_dir or ".")) / project
            self.logger = self.new_logger(project)
            self._loop = loggers.LoggedLoop([self.logger], folder, self._config, is_main_process=is_main)
            if is_main:
                self.write_configuration(folder, self._config)
        return self._loop

    def new_logger(self, project: str) -> loggers.Logger:
        """Make the logger for a project."""
        return loggers.logger_for(self.name, project, **self.options)

    def write_configuration(self, folder: Path, values: dict[str, Any]) -> None:
        """Write files of one's own about the configuration."""

    @property
    def tracker(self) -> Any:
        self._open()
        return getattr(self.logger, "experiment", None) or self.logger

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if kwargs:
            reason = f"has no counterpart; use accelerator.get_tracker({self.name!r}, unwrap=True)"
            raise TypeError(f"log_kwargs of {self.name}: {', '.join(kwargs)} {reason}")
        self._open()(_flat(values), step)

    def finish(self) -> None:
        self._open().close()


class _InProject(loggers.TensorBoardLogger):
    """Writes its event file where Accelerate does: directly into the project's folder."""

    def _folder_of(self, run: Run) -> Path:
        return run.folder if self.dir is None else super()._folder_of(run)


class TensorBoardTracker(LoggerTracker):
    """TensorBoard's event file, and the configuration in ``hparams.yml``, in ``logging_dir/run_name``."""

    name = "tensorboard"
    requires_logging_directory = True

    def new_logger(self, project: str) -> loggers.Logger:
        return _InProject(**self.options)

    def write_configuration(self, folder: Path, values: dict[str, Any]) -> None:
        if values:
            file = folder / str(time.time()) / "hparams.yml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(values, sort_keys=False))


class WandBTracker(LoggerTracker):
    """The tracker that logs to Weights & Biases."""

    name, main_process_only = "wandb", False


class TrackioTracker(LoggerTracker):
    """The tracker that logs to Trackio."""

    name, main_process_only = "trackio", False


class AimTracker(LoggerTracker):
    """The tracker that logs to Aim."""

    name = "aim"


class MLflowTracker(LoggerTracker):
    """The tracker that logs to MLflow."""

    name = "mlflow"

    def __init__(
        self, experiment_name: str | None = None, logging_dir: str | Path | None = None, **options: Any
    ) -> None:
        super().__init__(experiment_name, logging_dir, **options)


class RegisteredTracker(GeneralTracker):
    """Makes an object of a class given to :func:`register_tracker_class` when the trackers start."""

    def __init__(self, kind: Callable[..., GeneralTracker], name: str, in_folder: bool) -> None:
        self.kind, self.name, self.requires_logging_directory = kind, name, in_folder

    def started_tracker(
        self, project: str, logging_dir: str | Path | None, config: dict[str, Any], options: dict[str, Any]
    ) -> GeneralTracker:
        folder = (logging_dir,) if self.requires_logging_directory else ()
        return self.kind(project, *folder, **options).started_tracker(project, logging_dir, config, {})


LOGGER_TYPE_TO_CLASS: dict[str, Any] = {
    kind.name: kind for kind in (AimTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker)
}
"""Name of a tracker -> its class."""


def register_tracker_class(tracker_class: Any) -> None:
    """Let ``log_with`` know a class by its ``name``.

    Raises:
        TypeError: the class is not a subclass of :class:`GeneralTracker`.
        ValueError: the class has no name.
    """
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise TypeError(f"register_tracker_class takes a subclass of GeneralTracker, got {tracker_class!r}")
    if not tracker_class.name:
        raise ValueError(f"{tracker_class.__name__} needs a name: set it in the class")
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker {tracker_class.name!r} is replaced by {tracker_class.__name__}", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def get_available_trackers() -> list[str]:
    """The names of the trackers whose packages are installed."""
    return [name for name in loggers.TRACKERS if importlib.util.find_spec(name)]


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
    entries = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    trackers: list[GeneralTracker] = []
    for entry in entries:
        name = str(entry).lower()
        if isinstance(entry, GeneralTracker):
            trackers.append(entry)
        elif name == "all":
            trackers += [LOGGER_TYPE_TO_CLASS[package]() for package in get_available_trackers()]
        elif entry is not None and name not in LOGGER_TYPE_TO_CLASS:
            possible = f"{', '.join(LOGGER_TYPE_TO_CLASS)}, and objects of subclasses of GeneralTracker"
            raise ValueError(f"log_with={entry!r} has no counterpart; there are {possible}")
        elif entry is not None:
            kind = LOGGER_TYPE_TO_CLASS[name]
            is_own = issubclass(kind, LoggerTracker)
            trackers.append(kind() if is_own else RegisteredTracker(kind, name, kind.requires_logging_directory))
    return trackers


filter_trackers = trackers_for


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to run on the main process only, unless the tracker has ``main_process_only = False``."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs = not self.main_process_only or PartialState().is_main_process
        return function(self, *args, **kwargs) if runs else None

    return run
