"""Lightning's loggers: ours under their names and arguments, and any object with ``log_metrics`` as a logger of :class:`engine.Fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import callbacks
from engine.callback import Callback as OwnCallback
from engine.interop.lightning.refused import ANY, refused_class, translated
from engine.loop.run import Run


class Logger:
    """Subclass it as Lightning's: define ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``."""

    group_separator = "/"
    name: Any = None
    version: Any = None
    root_dir: Any = None
    log_dir: Any = None
    save_dir: Any = None
    experiment: Any = None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record ``metrics`` of a ``step``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_metrics(self, metrics, step)")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None: ...
    def save(self) -> None: ...
    def finalize(self, status: str) -> None: ...
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...


class AdaptedLogger(OwnCallback):
    """A ``logger`` of Lightning's kind, ours or a real one, as a callback of :class:`engine.Fit`. Steps are optimizer steps done."""

    is_logger = True

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.experiment = None

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self.experiment = self.logger.experiment
        if run.is_main_process and run.hyperparameters and stage == "fit":
            self.logger.log_hyperparams(dict(run.hyperparameters))

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if run.is_main_process:
            self.logger.log_metrics({**metrics, "epoch": run.epoch}, step)
            self.logger.save()

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if run.is_main_process:
            self.logger.finalize("success" if run.exception is None else "failed")


class WrappedLogger(Logger):
    """A logger of the package ``callbacks``, ``ours``, under Lightning's name. Its files are in the run's folder: ``root_dir`` or a numbered
    folder in it."""

    def __init__(self, ours: OwnCallback, save_dir: Any = None, name: str | None = None, version: Any = None) -> None:
        self.ours, self.save_dir, self.name, self.version = ours, save_dir, name, version
        self._run: Run | None = None
        if save_dir is not None:
            numbered = "" if version is None else version if isinstance(version, str) else f"version_{version}"
            self.root_dir = str(Path(save_dir) / (name or "") / numbered)

    def joins(self, run: Run) -> None:
        """A run starts."""
        self._run, self.log_dir = run, str(run.home.path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["ours"], name)

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """The tracker's own object."""
        return self.ours.experiment  # type: ignore[attr-defined]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._run is None:
            raise RuntimeError(f"{type(self).__name__}.log_metrics() is only possible during a run")
        values = {name: float(value) for name, value in metrics.items()}
        self.ours.on_log(self._run, self._run.module, values, self._run.step if step is None else step)


_WITHOUT = {
    "prefix": ("", "put it into the names that you log"),
    "log_graph": (False, "the graph is not written"),
    "sub_dir": (None, "put it into save_dir"),
    "log_model": (False, "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"),
    "experiment": (None, "the logger makes the run: use logger.experiment"),
    **dict.fromkeys(("id", "run_id"), (None, "a resumed run continues by itself")),
    **dict.fromkeys(("default_hp_metric", "flush_logs_every_n_steps", "synchronous"), (ANY, "")),
}


class _Local(WrappedLogger):
    make: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = translated(type(self).__name__, "save_dir name version", args, kwargs, _WITHOUT)
        place = {"name": "lightning_logs", "version": None} | {
            k: given.pop(k) for k in ("save_dir", "name", "version") if k in given
        }
        super().__init__(self.make(**given), **place)


class TensorBoardLogger(_Local):
    """Lightning's arguments of :class:`callbacks.TensorBoardLogger`."""

    make = callbacks.TensorBoardLogger


class CSVLogger(_Local):
    """Lightning's arguments of :class:`callbacks.CSVLogger`."""

    make = callbacks.CSVLogger


class WandbLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.WandbLogger`; others are ``wandb.init``'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = translated(
            "WandbLogger", "name save_dir version offline dir id anonymous project", args, kwargs, _WITHOUT
        )
        mode = "offline" if given.pop("offline", False) else None
        folder, version = given.pop("save_dir", None), given.pop("version", None)
        super().__init__(callbacks.WandbLogger(mode=mode, **given), folder, given.get("project"), version)


class MLFlowLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.MLflowLogger`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        order = (
            "experiment_name run_name tracking_uri tags save_dir log_model prefix artifact_location run_id synchronous"
        )
        given = translated("MLFlowLogger", order, args, kwargs, _WITHOUT)
        given["tracking_uri"] = given.get("tracking_uri") or given.pop("save_dir", "./mlruns")
        super().__init__(callbacks.MLflowLogger(**{"experiment_name": "lightning_logs", **given}))


CometLogger = refused_class("CometLogger", "give Lightning's own, or a Logger with log_metrics")
NeptuneLogger = refused_class("NeptuneLogger", "give Lightning's own, or a Logger with log_metrics")
