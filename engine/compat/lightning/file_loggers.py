"""The part that Lightning's loggers of files have in common: a folder for each version, ``hparams.yaml``, and values from outside of a run."""

from __future__ import annotations

import os
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn

import engine.callbacks as own
from callbacks.loggers import LoggedLoop
from callbacks.loggers import PlainLogger as Logger
from callbacks.loggers.base import NOTHING
from engine.compat.lightning.log_folders import latest_trained, next_version, version_folder
from engine.config.hyperparameters import as_data
from engine.config.masked import plain_value
from engine.distributed.rank_work import own_rank
from engine.loop.run import Run
from engine.utils.paths import expanded


class _Wrapped:
    """The part of the wrapped loggers that belongs to their :class:`FileLogger`, ``stands_for``."""

    stands_for: FileLogger
    continues = False
    """Whether the files have values that this logger has written outside of a run, or in an earlier run."""
    is_alone = False
    """Whether no run is under way."""

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[{self.stands_for.name}]; {self.stands_for.given}"

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self.is_alone = not isinstance(run, Run)
        if not self.is_alone:
            self.stands_for.begin(run)
        super().setup(run, module, stage)  # type: ignore[misc]

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        super().teardown(run, module, stage)  # type: ignore[misc]
        self.continues = True


class Rows(_Wrapped, own.CSVLogger):
    """This library's CSV logger, for a :class:`FileLogger`: rows from outside of a run stay, and hyperparameters are in ``hparams.yaml``."""

    def describe(self, values: Mapping[str, Any]) -> None:
        pass

    def rewind(self, step: int) -> None:
        if step or not self.continues:
            super().rewind(step)
        else:
            self._write_config(step)

    def _write_config(self, step: int) -> None:
        if not self.is_alone:
            super()._write_config(step)


class Events(_Wrapped, own.TensorBoardLogger):
    """This library's TensorBoard logger, for a :class:`FileLogger`: it writes into that logger's folder, and earlier values stay."""

    def _folder_of(self, run: Run) -> Path:
        assert self.dir is not None
        return self.dir

    def rewind(self, step: int) -> None:
        if not step and self.continues and self._writer is not None:
            self._earlier = False  # the files from before are this logger's
        super().rewind(step)


class FileLogger(Logger):
    """Wraps a logger of this library, ``wrapped``, that writes files. The base of those with Lightning's names and arguments.

    It writes into :attr:`log_dir`, from the first value on, also without a run. ``version=None``: the next free number, known as soon as it is
    read; each training with this logger takes a new one.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    LOGGER_JOIN_CHAR = "-"
    saves_empty = False
    """Whether ``hparams.yaml`` is written without hyperparameters, too."""
    of: type[Rows | Events]
    """The class of the wrapped logger."""

    def __init__(
        self,
        save_dir: Any = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        sub_dir: Any = None,
        **options: Any,
    ) -> None:
        self.given = f"save_dir={save_dir}, version={version}, sub_dir={sub_dir}"
        """The arguments that tell two loggers apart, as text."""
        self.wrapped = self.of(**options)
        """The wrapped logger, which is passed to ``Fit``."""
        self.wrapped.stands_for = self
        self.save_dir, self.name = os.fspath("." if save_dir is None else save_dir), name or ""
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self.hparams: dict[str, Any] = {}
        self._version, self._is_numbered, self._has_trained = version, version is None, False
        self._run_folder: str | None = None
        self._writer: Any = None
        self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_writer": None}

    # -- where it writes ----------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | str:
        """The given version, or the number of the folder."""
        if self._version is None:
            self._version = next_version(self.root_dir)
        return self._version

    @property
    def root_dir(self) -> str:
        """The folder of all versions."""
        return os.path.join(self.save_dir, self.name)

    @property
    def run_root(self) -> str:
        """The ``root_dir`` of a run with this logger; a second run gets a folder in it."""
        return version_folder(expanded(os.path.expandvars(self.root_dir)), self.version)

    @property
    def log_dir(self) -> str:
        """The folder of this logger's files."""
        folder = self._run_folder or self.run_root
        return os.path.join(folder, self.sub_dir) if self.sub_dir else folder

    def renew(self, *, resumes: bool) -> None:
        """Take the next version for a training, unless the version is given, or known and not used. ``resumes``: take the latest one that exists."""
        if self._is_numbered and self._has_trained:
            self._version, self._run_folder = None, None
            self.wrapped.continues = False
        if self._version is None and resumes:
            self._version = latest_trained(self.root_dir)

    # -- in a run -----------------------------------------------------------------------------------------------------------------

    def attach_run(self, run: Run) -> None:
        """Write into the folder of ``run``, which is starting, if the run has this logger's ``run_root``."""
        if run.settings.root_dir == Path(self.run_root):
            self._run_folder = str(run.checkpoints.run_folder.path)
        self._has_trained = self._has_trained or run.stage == "fit"

    def begin(self, run: Run) -> None:
        """Write into the files of :attr:`log_dir` in ``run``, with the hyperparameters of its module and its data module."""
        self._close()
        self.wrapped.dir = Path(self.log_dir)
        if run.is_main_process and run.stage != "predict":
            self.hparams.update(run.hyperparameters)
            self.save()

    # -- values, in a run or without ----------------------------------------------------------------------------------------------

    @property
    def in_run(self) -> bool:
        """Whether the wrapped logger is open in a run."""
        return self.wrapped._current_run is not None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        if self.in_run:
            self.wrapped.log_metrics(values, step)
        elif not own_rank():
            self._write_alone(values, step)

    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        entries = {} if params is None else vars(params) if isinstance(params, Namespace) else dict(params)
        if not own_rank():
            self.hparams.update(plain_value(as_data(entries)))
            self._note_hyperparameters(entries)
        if metrics:
            self.log_metrics(metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}, step)

    def save(self) -> None:
        """Write ``hparams.yaml``; values are in their files as soon as they are logged."""
        if not own_rank() and (self.hparams or self.saves_empty):
            folder = Path(self.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.NAME_HPARAMS_FILE).write_text(yaml.safe_dump(self.hparams), encoding="utf-8")

    def finalize(self, status: str) -> None:
        self.save()

    @abstractmethod
    def _write_alone(self, values: dict[str, float], step: int | None) -> None:
        """Write values outside of a run."""

    @abstractmethod
    def _note_hyperparameters(self, values: dict[str, Any]) -> None:
        """Note hyperparameters that :meth:`log_hyperparams` got, in a run or outside of one."""

    def _close(self) -> None:
        """Close what is open outside of a run."""


class RowLogger(FileLogger):
    """A logger of rows in ``metrics.csv``."""

    of = Rows

    @property
    def experiment(self) -> Any:
        """The logger itself; on ranks other than 0 an object that does nothing."""
        return NOTHING if own_rank() else self

    @property
    def metrics_file_path(self) -> str:
        """The path of the file of rows."""
        return os.path.join(self.log_dir, self.wrapped.name)

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Do the same as :meth:`log_hyperparams`."""
        self.log_hyperparams(params)

    def _write_alone(self, values: dict[str, float], step: int | None) -> None:
        self.wrapped.dir = Path(self.log_dir)
        self._rows = self._rows if step is None else int(step)
        with LoggedLoop([self.wrapped], self.log_dir) as loop:
            loop(values, self._rows)
        self._rows += 1

    def _note_hyperparameters(self, values: dict[str, Any]) -> None:
        self.save()


class EventLogger(FileLogger):
    """A logger of TensorBoard's events."""

    of = Events
    saves_empty = True

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``; on ranks other than 0 an object that does nothing."""
        if own_rank():
            return NOTHING
        if self.in_run:
            return self.wrapped.experiment
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer, self.wrapped.continues = SummaryWriter(self.log_dir), True
        return self._writer

    def _write_alone(self, values: dict[str, float], step: int | None) -> None:
        for name, value in values.items():
            self.experiment.add_scalar(name, value, step)
        self.experiment.flush()

    def _note_hyperparameters(self, values: dict[str, Any]) -> None:
        if self.in_run:
            self.wrapped.log_hyperparams(values)
            return
        from torch.utils.tensorboard.summary import hparams

        plain = {name: v if isinstance(v, (str, int, float)) else str(v) for name, v in self.hparams.items()}
        for summary in hparams(plain, {}):
            self.experiment.file_writer.add_summary(summary)
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
