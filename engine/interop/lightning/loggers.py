"""Lightning's loggers: this library's under its names and arguments, and any object with ``log_metrics`` as a logger of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine.callbacks as own
from engine.callback import Callback as OwnCallback
from engine.interop.lightning.refused import ANY, refused_class, translated


class Logger(OwnCallback):
    """Subclass it as Lightning's: define ``log_metrics(metrics, step)`` and ``log_hyperparams(params)``. Steps are optimizer steps done."""

    is_logger = True
    group_separator = "/"
    root_dir: Any = None
    save_dir: Any = None
    name: Any = None
    version: Any = None
    log_dir: Any = None
    experiment: Any = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...
    def log_graph(self, model: Any, input_array: Any = None) -> None: ...
    def save(self) -> None: ...
    def finalize(self, status: str) -> None: ...
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Record ``metrics`` of a ``step``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_metrics(self, metrics, step)")

    def setup(self, run: Any, module: Any, stage: str) -> None:
        if run.is_main_process and run.hyperparameters and stage == "fit":
            self.log_hyperparams(dict(run.hyperparameters))

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if run.is_main_process:
            self.log_metrics({**metrics, "epoch": run.epoch}, step)
            self.save()

    def teardown(self, run: Any, module: Any, stage: str) -> None:
        if run.is_main_process:
            self.finalize("success" if run.exception is None else "failed")


class AdaptedLogger(Logger):
    """A logger of the installed Lightning as one of :class:`engine.Fit`."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        for name in ("log_metrics", "log_hyperparams", "save", "finalize", "name", "version", "save_dir", "log_dir"):
            if hasattr(logger, name):
                setattr(self, name, getattr(logger, name))

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """The tracker's own object."""
        return self.logger.experiment


_WITHOUT = {
    "prefix": ("", "put it into the names that you log"),
    "log_graph": (False, "the graph is not written"),
    "sub_dir": (None, "put it into save_dir"),
    "log_model": (False, "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"),
    "experiment": (None, "the logger makes the run: use logger.experiment"),
    **dict.fromkeys(("id", "run_id"), (None, "a resumed run continues by itself")),
    **dict.fromkeys(("default_hp_metric", "flush_logs_every_n_steps", "synchronous"), (ANY, "")),
}


class WrappedLogger(Logger):
    """A logger of this library, ``ours``, under Lightning's name; ``Trainer`` gives ``ours`` to ``Fit``. Its files are in the run's folder, which is
    ``root_dir`` (``save_dir/name``) or a numbered folder in it."""

    def __init__(self, ours: Any, save_dir: Any = None, name: str | None = None, version: Any = None) -> None:
        self.ours, self.save_dir, self.name, self.version, self._run = ours, save_dir, name, version, None
        number = "" if version is None else version if isinstance(version, str) else f"version_{version}"
        self.root_dir = None if save_dir is None else str(Path(save_dir) / (name or "") / number)

    def joins(self, run: Any) -> None:
        """A run starts."""
        self._run, self.log_dir = run, str(run.home.path)

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """The tracker's own object."""
        return self.ours.experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self._run is None:
            raise RuntimeError(f"{type(self).__name__}.log_metrics() is only possible during a run")
        values = {name: float(value) for name, value in metrics.items()}
        self.ours.on_log(self._run, self._run.module, values, self._run.step if step is None else step)


class TensorBoardLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.TensorBoardLogger`."""

    def __init__(
        self, save_dir: Any, name: str | None = "lightning_logs", version: Any = None, *args: Any, **options: Any
    ) -> None:
        order = "log_graph default_hp_metric prefix sub_dir"
        given = translated("TensorBoardLogger", order, args, options, _WITHOUT)
        super().__init__(own.TensorBoardLogger(**given), save_dir, name, version)


class CSVLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.CSVLogger`."""

    def __init__(
        self, save_dir: Any, name: str | None = "lightning_logs", version: Any = None, *args: Any, **options: Any
    ) -> None:
        given = translated("CSVLogger", "prefix flush_logs_every_n_steps", args, options, _WITHOUT)
        super().__init__(own.CSVLogger(**given), save_dir, name, version)


class WandbLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.WandbLogger`; others are ``wandb.init``'s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        given = translated(
            "WandbLogger", "name save_dir version offline dir id anonymous project", args, options, _WITHOUT
        )
        folder, version, offline = (given.pop(name, None) for name in ("save_dir", "version", "offline"))
        ours = own.WandbLogger(mode="offline" if offline else None, **given)
        super().__init__(ours, folder, given.get("project"), version)


class MLFlowLogger(WrappedLogger):
    """Lightning's arguments of :class:`callbacks.MLflowLogger`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        order = (
            "experiment_name run_name tracking_uri tags save_dir log_model prefix artifact_location run_id synchronous"
        )
        given = {"experiment_name": "lightning_logs"} | translated("MLFlowLogger", order, args, options, _WITHOUT)
        folder = given.pop("save_dir", "./mlruns")
        given["tracking_uri"] = given.get("tracking_uri") or folder
        super().__init__(own.MLflowLogger(**given), None, given["experiment_name"])


CometLogger = NeptuneLogger = refused_class("This logger", "give Lightning's own, or a Logger with log_metrics")
