"""Lightning's loggers: ours under their names and arguments, and any object with ``log_metrics`` as a logger of :class:`engine.Fit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import callbacks
from engine.callback import Callback as OwnCallback
from engine.interop.lightning.refused import leave_out, refused_class
from engine.loop.run import Run


class Logger:
    """Subclass it as Lightning's: define ``name``, ``version``, ``log_metrics`` and ``log_hyperparams``."""

    group_separator = "/"

    @property
    def name(self) -> str | None:
        """The experiment's name."""
        return None

    @property
    def version(self) -> int | str | None:
        """The experiment's version."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of all versions."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this version."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder that the user gave."""
        return self.root_dir

    @property
    def experiment(self) -> Any:
        """The tracker's own object."""
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record ``metrics`` of a ``step``."""
        raise NotImplementedError(f"{type(self).__name__} must define log_metrics(self, metrics, step)")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None: ...
    def save(self) -> None: ...
    def finalize(self, status: str) -> None: ...
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...


class AdaptedLogger(OwnCallback):
    """A ``logger`` of Lightning's kind, ours or a real one, as a callback of :class:`engine.Fit`. Steps are optimizer steps done."""

    is_logger = True

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @property
    def experiment(self) -> Any:
        """The tracker's own object."""
        return self.logger.experiment

    @property
    def state_key(self) -> str:
        return f"{type(self.logger).__qualname__}; {id(self.logger)}"

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
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
    """A logger of the package ``callbacks`` under Lightning's name. Its files are in the run's folder, which ``save_dir`` and ``name`` choose."""

    ours: OwnCallback
    folder: Path | None = None
    """Where runs have their folders; ``None``: the trainer's ``default_root_dir``."""
    _name: str | None = None
    _run: Run | None = None

    def at(self, save_dir: Any, name: str | None, version: int | str | None) -> None:
        """Choose the folder as Lightning does: ``save_dir/name/version_0``; here the first run has ``save_dir/name`` itself."""
        self._save_dir, self._name, self._version = save_dir, name, version
        if save_dir is not None:
            self.folder = Path(save_dir) / (name or "")
            if version is not None:
                self.folder /= version if isinstance(version, str) else f"version_{version}"

    def joins(self, run: Run) -> None:
        """A run starts."""
        self._run = run

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def version(self) -> int | str | None:
        return self._version

    @property
    def save_dir(self) -> str | None:
        return None if self._save_dir is None else str(self._save_dir)

    @property
    def root_dir(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    @property
    def log_dir(self) -> str | None:
        return self.root_dir if self._run is None else str(self._run.home.path)

    @property
    def experiment(self) -> Any:
        return getattr(self.ours, "experiment", None)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._run is None:
            raise RuntimeError(f"{type(self).__name__}.log_metrics() is only possible during a run")
        self.ours.on_log(
            self._run,
            self._run.module,
            {k: float(v) for k, v in metrics.items()},
            self._run.step if step is None else step,
        )


_NO_PREFIX = {"prefix": ("", "put it into the names that you log")}


class TensorBoardLogger(WrappedLogger):
    """Lightning's arguments of ``callbacks.TensorBoardLogger``."""

    def __init__(
        self,
        save_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        **options: Any,
    ) -> None:
        leave_out(
            "TensorBoardLogger", {"log_graph": log_graph, **options},
            {"log_graph": (False, "the graph is not written"), "sub_dir": (None, "put it into save_dir"), **_NO_PREFIX},
        )  # fmt: skip
        self.ours = callbacks.TensorBoardLogger()
        self.at(save_dir, name, version)


class CSVLogger(WrappedLogger):
    """Lightning's arguments of ``callbacks.CSVLogger``; rows are written when values are logged, whatever ``flush_logs_every_n_steps`` is."""

    def __init__(
        self,
        save_dir: Any,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        leave_out("CSVLogger", {"prefix": prefix}, _NO_PREFIX)
        self.ours = callbacks.CSVLogger()
        self.at(save_dir, name, version)


class WandbLogger(WrappedLogger):
    """Lightning's arguments of ``callbacks.WandbLogger``; others are ``wandb.init``'s."""

    def __init__(
        self,
        name: str | None = None,
        save_dir: Any = ".",
        version: str | None = None,
        offline: bool = False,
        project: str | None = None,
        **options: Any,
    ) -> None:
        own = {
            "log_model": (False, "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"),
            "experiment": (None, "the logger makes the run; use logger.experiment"),
            "id": (None, "a resumed run continues the run in W&B by itself"),
            **_NO_PREFIX,
        }
        leave_out("WandbLogger", {**options, "id": options.get("id", version)}, own)
        init = {key: value for key, value in options.items() if key not in own}
        self.ours = callbacks.WandbLogger(project, name, mode="offline" if offline else None, **init)
        self.at(None, project, version)


class MLFlowLogger(WrappedLogger):
    """Lightning's arguments of ``callbacks.MLflowLogger``."""

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        artifact_location: str | None = None,
        **options: Any,
    ) -> None:
        own = {
            "log_model": (False, "log checkpoints in on_checkpoint_saved"),
            "run_id": (None, "a resumed run continues by itself"),
        }
        leave_out("MLFlowLogger", options, {**own, **_NO_PREFIX})
        self.ours = callbacks.MLflowLogger(experiment_name, run_name, tracking_uri or save_dir, tags, artifact_location)
        self.at(None, experiment_name, None)


CometLogger = refused_class("CometLogger", "write a Logger with log_metrics, or give Lightning's own")
NeptuneLogger = refused_class("NeptuneLogger", "write a Logger with log_metrics, or give Lightning's own")
