"""This library's loggers under Lightning's names and arguments, and an adapter for any object with ``log_metrics``."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import engine.callbacks as own
from callbacks.loggers import ForwardingLogger as AdaptedLogger  # noqa: F401
from callbacks.loggers import PlainLogger as Logger
from callbacks.loggers.base import NOTHING
from callbacks.loggers.base import Logger as TrackerLogger
from engine.compat.checked_arguments import with_arguments_of
from engine.compat.lightning.arguments import LOGGERS
from engine.compat.lightning.file_loggers import EventLogger, FileLogger, RowLogger
from engine.distributed.rank_work import rank_zero_experiment as rank_zero_experiment
from engine.loop.run import Run
from engine.utils.log import logger as log
from engine.utils.paths import expanded

Folder = str | PathLike[str] | None


class WrappedLogger(Logger):
    """Wraps a logger of this library that sends values to a tracker, ``wrapped``, under Lightning's name and arguments. The run's folder is
    ``root_dir`` (``save_dir/name/version``) or a numbered folder in it."""

    of: type[TrackerLogger]
    """The class of the wrapped logger."""
    wrapped: TrackerLogger
    """The wrapped logger, which is passed to ``Fit``."""
    _run: Run | None = None
    _experiment: Any = None

    def __init__(self, **arguments: Any) -> None:
        self.save_dir, self.version = arguments.pop("save_dir", None), arguments.pop("version", None)
        self._numbered = self.version is None
        self.name = self.translate_arguments(arguments)
        if self.save_dir is not None:
            version = f"version_{self.version}" if isinstance(self.version, int) else self.version
            self.root_dir = str(Path(expanded(self.save_dir)) / (self.name or "") / (version or ""))
        self.wrapped = self.of(**arguments)
        self.wrapped.stands_for = self

    def __getstate__(self) -> dict[str, Any]:
        # A run and a tracker belong to this process.
        return {**vars(self), "_run": None, "_experiment": None}

    def translate_arguments(self, arguments: dict[str, Any]) -> Any:
        """Change ``arguments`` in place to those of the wrapped logger, and return the experiment's name."""
        return arguments.pop("name", "lightning_logs")

    def attach_run(self, run: Run) -> None:
        self._run, self.log_dir = run, str(run.checkpoints.run_folder.path)
        folder = run.checkpoints.run_folder.path.name.removeprefix("version_")
        if self._numbered:
            self.version = int(folder) if folder.isdecimal() else 0
        self.save_dir = str(run.settings.root_dir.parent) if self.save_dir is None else self.save_dir
        run.hooks.add("on_fit_end", type(self).__name__, self._keep_experiment)

    def _keep_experiment(self, run: Run, module: Any) -> None:
        """Keep a reference to the tracker's object for use after the run; an error of the tracker is only logged."""
        try:
            self._experiment = self.wrapped.experiment
        except Exception:
            log.exception("%s.experiment is not there after the run", type(self).__name__)

    @property
    def experiment(self) -> Any:
        """The tracker's own object, such as TensorBoard's ``SummaryWriter`` or W&B's run; after a training, the object that the training used."""
        return self.wrapped.experiment if self._run is None or self._run.module.attached else self._experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.wrapped.log_metrics(metrics, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.wrapped.log_hyperparams(params)


class TensorBoardLogger(EventLogger):
    """Our TensorBoard logger with Lightning's arguments; see :class:`FileLogger`."""

    @with_arguments_of(FileLogger, LOGGERS)
    def __init__(
        self, save_dir: Folder, name: str | None = "lightning_logs", version: int | str | None = None, log_graph: bool = False,
        default_hp_metric: bool = True, prefix: str = "", sub_dir: Folder = None, **kwargs: Any,
    ) -> None: ...  # fmt: skip


class CSVLogger(RowLogger):
    """Our CSV logger with Lightning's arguments; see :class:`FileLogger`."""

    @with_arguments_of(FileLogger, LOGGERS)
    def __init__(
        self, save_dir: Folder, name: str | None = "lightning_logs", version: int | str | None = None, prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None: ...  # fmt: skip


class DummyLogger(Logger):
    """Takes every call of a logger, also of methods that loggers do not have, and does nothing; ``Trainer(fast_dev_run=True)`` has it."""

    name = version = ""
    experiment = NOTHING

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getitem__(self, number: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class WandbLogger(WrappedLogger):
    """Our Weights & Biases logger with Lightning's arguments."""

    of = own.WandbLogger

    @with_arguments_of(WrappedLogger, LOGGERS)
    def __init__(
        self, name: str | None = None, save_dir: Folder = ".", version: str | None = None, offline: bool = False,
        dir: Folder = None, id: str | None = None, anonymous: bool | None = None, project: str | None = None,
        log_model: Literal["all"] | bool = False, experiment: Any = None, prefix: str = "", checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable", **kwargs: Any,
    ) -> None: ...  # fmt: skip

    def translate_arguments(self, arguments: dict[str, Any]) -> Any:
        arguments["mode"] = "offline" if arguments.pop("offline", False) else None
        return arguments.get("project")


class MLFlowLogger(WrappedLogger):
    """Our MLflow logger with Lightning's arguments."""

    of = own.MLflowLogger

    @with_arguments_of(WrappedLogger, LOGGERS)
    def __init__(
        self, experiment_name: str = "lightning_logs", run_name: str | None = None, tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None, save_dir: str | None = "./mlruns", log_model: Literal["all"] | bool = False,
        prefix: str = "", artifact_location: str | None = None, run_id: str | None = None, synchronous: bool | None = None,
    ) -> None: ...  # fmt: skip

    def translate_arguments(self, arguments: dict[str, Any]) -> Any:
        arguments["tracking_uri"] = arguments.get("tracking_uri") or self.save_dir or "./mlruns"
        return arguments.setdefault("experiment_name", "lightning_logs")
