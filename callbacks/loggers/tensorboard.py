"""A logger for TensorBoard's event files."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine import Run

from .append_file import AppendFile
from .base import Logger, Moment, settings_of
from .media import finite, markdown, pixels, sound


class TensorBoardLogger(Logger):
    """Writes event files for TensorBoard: ``pip install tensorboard``, then ``tensorboard --logdir runs``.

    Each metric is a series over the steps (optimizer steps done), with the series ``epoch`` and ``samples`` (trained on so far, by all ranks) beside
    them. Hyperparameters and settings, without secrets, are in the tab HPARAMS. Everything is in the file soon after it is logged: a
    kill loses nothing. A run that resumes from an earlier step writes the step from which TensorBoard cuts the series (``purge_step``).
    An artifact becomes a text with its path; a sound becomes the mean of its channels.
    """

    takes = frozenset({"image", "histogram", "text", "audio", "figure", "table", "artifact"})
    rewinds = takes_back = True
    threaded = False

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        retries: int = 3,
        waiting: int = 10_000,
        patience_s: float = 30.0,
    ) -> None:
        """
        Args:
            dir: a folder for many runs; each run gets a folder in it, named after the run's folder and id. ``None``: ``tensorboard`` in the
                run's folder.
            retries, waiting, patience_s: as in :class:`Logger`.
        """
        super().__init__(retries=retries, waiting=waiting, patience_s=patience_s)
        self.dir = None if dir is None else Path(dir).expanduser()
        self.path: Path | None = None
        """The folder of the event files; known from the start of the first run."""
        self._new_writer: Any = None
        self._summary_writer: Any = None
        self._earlier = False  # there were event files before this process's
        self._creation = threading.Lock()
        self._settings: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Open files and locks belong to this process.
        return {**vars(self), "_creation": None, "_summary_writer": None, "_new_writer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _creation=threading.Lock())

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}; dir={self.dir}"

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self._require_run("name").folder.name

    @property
    def log_dir(self) -> str:
        """The folder of the event files, on every rank."""
        return str(self._folder_of(self._require_run("log_dir")))

    def tracker(self) -> Any:
        return self._writer

    def describe(self, values: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        settings = {name: v if isinstance(v, (str, int, float)) else str(v) for name, v in values.items()}
        self._settings |= settings
        for summary in hparams(self._settings, {}):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def _folder_of(self, run: Run) -> Path:
        return run.folder / "tensorboard" if self.dir is None else self.dir / f"{run.folder.name}-{run.id[:8]}"

    def open(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger writes with the package tensorboard: pip install tensorboard"
            ) from error
        self.path = self._folder_of(run)
        self._settings = settings_of(run)
        self._new_writer = partial(SummaryWriter, str(self.path))
        self._summary_writer = None

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard.summary import hparams

        start, writer = SessionLog(status=SessionLog.START), self._writer
        if step or self._earlier:  # without earlier files it would cut what a module has written before the training
            writer.file_writer.add_event(Event(step=step + 1 if step else 0, session_log=start))
        if not step:
            for summary in hparams(self._settings, {}):
                self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def take_back(self, step: int, numbers: range) -> None:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        events: list[Any] = []
        for path in sorted(self._files()):
            for event in LegacyEventFileLoader(str(path)).Load():
                if (
                    event.HasField("session_log")
                    and event.session_log.status == SessionLog.START
                    and event.step <= step
                ):
                    events = []
                elif event.step == step and event.summary.value:
                    events.append(event)
        if len(events) < numbers[-1]:  # some have steps of their own
            return
        # TensorBoard cuts its series before this step; the values that stay are written again.
        writer = self._writer.file_writer
        writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        for number, event in enumerate(events, 1):
            if number not in numbers:
                writer.event_writer.add_event(event)
        self._writer.flush()

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(step=at.step, wall_time=at.time)  # one for all: add_scalar makes one for each
        for name, value in (values if at.repeated else {"epoch": at.epoch, "samples": at.samples, **values}).items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.file_writer.event_writer.add_event(event)
        self._writer.flush()

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        name, value = list(values.items())[-1]  # the last one that was written
        return any(
            event.step == at.step
            and any(metric.tag == name and metric.simple_value == np.float32(value) for metric in event.summary.value)
            for path in self._files()
            for event in LegacyEventFileLoader(str(path)).Load()
        )

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        when = (at.step, at.time)
        if kind in ("image", "figure"):
            self._writer.add_image(name, pixels(value), *when, dataformats="HWC")
        elif kind == "histogram":
            self._writer.add_histogram(name, finite(value), at.step, "auto", at.time)
        elif kind == "audio":
            self._writer.add_audio(name, sound(value).mean(1), at.step, options["sample_rate"], at.time)
        else:
            text = markdown(*value) if kind == "table" else str(value)
            self._writer.add_text(name, text, *when)
        self._writer.flush()

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        self.media("text", name, str(path.absolute()), at)

    def close(self, status: str) -> None:
        if self._summary_writer is not None:
            self._summary_writer.close()

    @property
    def _writer(self) -> Any:
        with self._creation:  # a module and the logger's thread may both be the first
            if self._summary_writer is None:
                before = self._files()
                writer = self._new_writer()
                (file,) = self._files() - before
                writer.file_writer.event_writer.close()
                writer.file_writer.event_writer = _EventFile(_last_by_name(file, before))
                self._summary_writer, self._earlier = writer, bool(before)
        return self._summary_writer

    def _files(self) -> set[Path]:
        assert self.path is not None
        return set(self.path.glob("events.out.tfevents.*"))


def _last_by_name(file: Path, earlier: set[Path]) -> Path:
    """Rename ``file`` so that its name comes after the ``earlier`` ones, if it does not: TensorBoard reads files in the order of their names.

    Names have the second of their creation, then the host, the process and a count whose 10 comes before its 9.
    """
    if not earlier or file > max(earlier):
        return file
    seconds = [int(second) for path in earlier if (second := path.name.split(".")[3]).isdecimal()]
    parts = file.name.split(".")
    parts[3] = f"{max(seconds, default=int(parts[3])) + 1:010d}"
    return file.rename(file.with_name(".".join(parts)))


class _EventFile:
    """Appends events to TensorBoard's file in the thread that calls.

    TensorBoard's own writer hands each event to a thread. Waiting until an event is in the file would cost three times as much as writing it.
    """

    def __init__(self, path: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder, self._lock = path.parent, threading.Lock()
        self._records = RecordWriter(AppendFile(path))

    def add_event(self, event: Any) -> None:
        with self._lock:
            self._records.write(event.SerializeToString())

    def flush(self) -> None:
        with self._lock:
            self._records.flush()

    def close(self) -> None:
        if not self._records.closed:
            self._records.close()

    def get_logdir(self) -> str:
        return str(self._folder)
