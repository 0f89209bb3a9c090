"""Lightning's loggers: this library's under its names and arguments, and any object with ``log_metrics`` as a logger of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine.callbacks as own
from callbacks.loggers import ForwardingLogger as AdaptedLogger  # noqa: F401
from callbacks.loggers import PlainLogger as Logger
from engine.compat.lightning.names import CLASSES, OF_LOGGERS
from engine.compat.refusals import refusing, translated
from engine.distributed.rank_zero import rank_zero_experiment as rank_zero_experiment


class WrappedLogger(Logger):
    """A logger of this library, ``ours``, under Lightning's name and arguments. Its files are in the run's folder: ``root_dir``
    (``save_dir/name``) or a numbered folder in it."""

    of: Any
    order: str
    """Lightning's positional arguments."""
    ours: Any
    """What ``Fit`` gets."""
    _run: Any = None

    def __init__(self, *args: Any, **options: Any) -> None:
        given = translated(type(self).__name__, self.order, args, options, OF_LOGGERS)
        self.save_dir, self.version = given.pop("save_dir", None), given.pop("version", None)
        self.name = self.settle(given)
        if self.save_dir is not None:
            version = f"version_{self.version}" if isinstance(self.version, int) else self.version
            self.root_dir = str(Path(self.save_dir) / (self.name or "") / (version or ""))
        self.ours = self.of(**given)

    def settle(self, given: dict[str, Any]) -> Any:
        """Turn the arguments into ours; return the experiment's name."""
        return given.pop("name", "lightning_logs")

    def joins(self, run: Any) -> None:
        self._run, self.log_dir = run, str(run.home.path)

    experiment = property(lambda self: self.ours.experiment)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self.ours.on_log(self._run, self._run.module, values, self._run.step if step is None else step)


class TensorBoardLogger(WrappedLogger):
    of, order = own.TensorBoardLogger, "save_dir name version log_graph default_hp_metric prefix sub_dir"


class CSVLogger(WrappedLogger):
    of, order = own.CSVLogger, "save_dir name version prefix flush_logs_every_n_steps"


class WandbLogger(WrappedLogger):
    of, order = own.WandbLogger, "name save_dir version offline dir id anonymous project"

    def settle(self, given: dict[str, Any]) -> Any:
        given["mode"] = "offline" if given.pop("offline", False) else None
        return given.get("project")


class MLFlowLogger(WrappedLogger):
    of = own.MLflowLogger
    order = "experiment_name run_name tracking_uri tags save_dir log_model prefix artifact_location run_id synchronous"

    def settle(self, given: dict[str, Any]) -> Any:
        given["tracking_uri"] = given.get("tracking_uri") or self.save_dir or "./mlruns"
        return given.setdefault("experiment_name", "lightning_logs")


__getattr__ = refusing("engine.interop.lightning.loggers", CLASSES)
