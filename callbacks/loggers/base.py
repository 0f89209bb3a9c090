"""Base class of loggers: when and from which thread values are sent, what happens when a tracker fails, and methods for modules to call."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from engine import Callback, Run

from .sender import Item, Sender
from .sent_mark import START, Position, SentMark


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment in a run at which values were logged."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """The epoch's number, from 0."""
    samples: int
    """Samples trained on so far, on all ranks."""
    time: float
    """Seconds since 1970."""
    run_step: int | None = None
    """Optimizer steps done, if the caller gave ``step``; ``None``: ``step`` is the run's own."""
    repeated: bool = False
    """Whether a tracker of single values leaves out ``epoch`` and ``samples``: they were sent at this step already, or belong to another step."""

    def values(self) -> list[Any]:
        """The values of all fields, in their order."""
        return [self.step, self.epoch, self.samples, self.time, self.run_step, self.repeated]


class Nothing:
    """Stands for a tracker's object on the ranks that do not log: takes every call, item and ``with`` block, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __bool__(self) -> bool:
        return False


NOTHING = Nothing()


class Logger(Callback):
    """Base class of loggers: ``CSVLogger``, ``JSONLLogger``, ``TensorBoardLogger`` and others of ``callbacks.loggers``. A run calls :meth:`on_log`.

    A subclass defines :meth:`open`, :meth:`scalars` and :meth:`close`; for media also :attr:`takes` and :meth:`media`; for :attr:`experiment` and
    hyperparameters that modules log also :meth:`tracker` and :meth:`describe`.

    All of them run on the main process only: ``open`` in ``setup``, where an error ends the run before its first step, the others in order in a
    thread of their own (see :attr:`threaded`), so that a slow tracker does not slow the training down. A call that fails is repeated up to
    ``retries`` times, after longer and longer pauses; then the error is logged, and the run continues without this logger (if a medium
    cannot be sent, without this medium).
    While a tracker does not answer, up to ``waiting`` values wait for it, up to 200 media among them; later values are left out, with a
    warning. At the end of the run the waiting values are sent, for at most ``patience_s`` seconds.

    A resumed run repeats the steps after its checkpoint, exactly. The run's folder (``sent/``) has a note of the values that a logger has sent; they
    are not sent again, unless the logger :attr:`rewinds`. Values that waited when a checkpoint was saved are in the checkpoint (without
    media), and are sent after the resume.
    """

    is_logger = True
    critical = False
    takes: frozenset[str] = frozenset()
    """The media that :meth:`media` can send: ``"image"``, ``"histogram"``, ``"text"``, ``"audio"``, ``"figure"``, ``"table"``; with
    ``"artifact"``, files for :meth:`artifact`."""
    rewinds = False
    """Whether :meth:`rewind` can remove values that were sent."""
    takes_back = False
    """Whether :meth:`take_back` can remove single values that were sent; a logger that can also :attr:`rewinds`."""
    threaded = True
    """``False``: values are sent at once, in the training's thread, and only media by another thread. For local files, which take 0.1 ms a row. While
    :meth:`scalars` raises an ``OSError`` (a full disk), values wait; they are sent in order once it succeeds."""

    _current_run: Run | None = None
    """The run under way, on every rank."""

    def __init__(self, *, retries: int = 3, waiting: int = 10_000, patience_s: float = 30.0) -> None:
        """
        Args:
            retries: how often a failed call is repeated.
            waiting: largest number of values that wait to be sent.
            patience_s: how long the end of a run waits for the tracker (s).

        Raises:
            ValueError: a number is negative, or ``waiting`` is 0.
        """
        if retries < 0 or waiting < 1 or patience_s < 0:
            raise ValueError(
                f"{type(self).__name__}(retries={retries}, waiting={waiting}, patience_s={patience_s}): retries and patience_s must be at "
                "least 0, waiting at least 1"
            )
        self.retries, self.waiting, self.patience_s = retries, waiting, patience_s
        self._sender: Sender | None = None
        self._sent_mark: SentMark | None = None
        self._training = False  # calls of a training are numbered, and sent once
        self._position: Position = START
        # The position before the values of an epoch that was cut off: a resumed run logs the whole epoch in their place.
        self._before_partial: Position | None = None
        # The position after which rows of the run's own step are removed before the next one: not if nothing more is logged, because that run stops.
        self._take_back_after: Position | None = None
        self._row_step = -1  # the step of the last values
        self._restored: dict[str, Any] | None = None
        # Calls before the training starts: they wait until the earlier run's rows are removed.
        self._early: list[Item] | None = None

    # -- to define ----------------------------------------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Open the tracker for ``run``. A resumed run has the same ``run.id``."""

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        """Send ``values``, which were logged ``at`` a moment of the run."""

    def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
        """Send the medium ``name`` whose ``kind`` is in :attr:`takes`; ``value`` as in :meth:`on_media`, ``options``: keywords of
        ``module.log_<kind>``."""

    def artifact(self, path: Path, name: str, at: Moment) -> None:
        """Send the file or folder at ``path`` under ``name``."""

    def close(self, status: str) -> None:
        """Close the tracker. ``status``: ``"completed"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""

    def has(self, values: Mapping[str, float], at: Moment) -> bool:
        """Whether the tracker already has ``values``. Asked once after a kill, for the row that was being sent."""
        return False

    def rewind(self, step: int) -> None:
        """Remove the values after ``step``, where a training resumes; 0: a new training starts. Called if the logger :attr:`rewinds`."""

    def take_back(self, step: int, numbers: range) -> None:
        """Remove what was sent at ``step``, where a training resumes, after its checkpoint: values of the epoch that was cut off there, for example.

        Called after :meth:`rewind`, if the logger :attr:`takes_back`. ``numbers``: which of the values and media at this step, counted from 1.
        """

    def tracker(self) -> Any:
        """Return the tracker's own object for :attr:`experiment`; the logger itself if there is none."""
        return self

    def describe(self, values: Mapping[str, Any]) -> None:
        """Send hyperparameters by flat names, in the logger's thread."""

    # -- for modules to call, in Lightning's words ------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The tracker's own object, while a run is under way: TensorBoard's ``SummaryWriter``, W&B's run, MLflow's client, Aim's run, the module
        ``trackio``; for files of rows the logger itself. On ranks other than 0 it is an object that does nothing.

        Its methods run at once, in the thread that calls them; values that the logger itself sends may still wait for its thread.

        Raises:
            AttributeError: no run is under way.
        """
        run = self._require_run("experiment")
        if not run.is_main_process:
            return NOTHING
        self._ensure_open(run)
        return self.tracker()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send numbers on rank 0, in order with the values that the run logs; calls on other ranks do nothing.

        Args:
            metrics: numbers of this rank, or tensors with one element, which the call waits for.
            step: the step to log; ``None``: the optimizer steps done.
        """
        run = self._require_run("log_metrics")
        if run.is_main_process:
            values = {name: float(value) for name, value in metrics.items()}
            self._ensure_open(run)
            self._send_values(run, values, step)

    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Send additional hyperparameters on rank 0. The run itself sends the ones of ``save_hyperparameters``.

        Args:
            params: a mapping, which may be nested, or a Namespace.
            metrics: numbers to log with them.
        """
        run = self._require_run("log_hyperparams")
        if run.is_main_process:
            hyperparameters = params if isinstance(params, Mapping) else {} if params is None else vars(params)
            self._ensure_open(run)
            self._send_settings({**hyperparameters, **more})
        if metrics:
            self.log_metrics(metrics)

    def save(self) -> None:
        """Do nothing: values are sent, or written, as soon as they are logged."""

    @property
    def version(self) -> str:
        """The run's id."""
        return self._require_run("version").id

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._require_run("save_dir").folder)

    @property
    def log_dir(self) -> str:
        """The folder of this logger's files, on every rank; the run's folder if the tracker is elsewhere."""
        return str(self._require_run("log_dir").folder)

    # -- events of the run ----------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._training, self._current_run = False, run
        self._early = [] if stage == "fit" and self.rewinds else None
        if run.is_main_process and stage != "predict":  # a prediction logs nothing, except for media
            self._open_tracker(run)

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        restored, self._restored = self._restored, None
        self._position = START if restored is None else (int(restored["step"]), int(restored["number"]))
        self._before_partial = self._take_back_after = None
        if self._sender is None or self._sent_mark is None:
            return
        self._training = True
        if self.rewinds:
            self._sent_mark.forget_after(run.step)
            self._row_step = self._sent_mark.row_step
            self._sender.submit(Item(partial(self.rewind, run.step)))
            if restored is not None and self.takes_back:
                self._take_back_after = self._position if self._position[0] == run.step else (run.step, 0)
                if self._early or restored["waiting"]:
                    self._take_back_rows()
        self._send_early()
        for position, moment, values in [] if restored is None else restored["waiting"]:
            self._send_row((int(position[0]), int(position[1])), values, Moment(*moment))

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if not run.is_main_process:
            return
        if self._training and run.values_are_partial:
            if not self.takes_back:  # these values have no number, so that none of the resumed run is taken for them
                at = Moment(run.step, run.epoch, run.samples, time.time(), repeated=run.step == self._row_step)
                self._send_call(None, partial(self.scalars, _printable(metrics), at), None)
                return
            self._before_partial = self._before_partial or self._position
        if (at_next := self._next_moment(run)) is not None:
            repeated, self._row_step = at_next.step == self._row_step, at_next.step
            self._send_row(self._position, dict(metrics), replace(at_next, repeated=True) if repeated else at_next)

    def on_media(self, run: Run, module: nn.Module, kind: str, name: str, value: Any, options: dict[str, Any]) -> None:
        if kind not in self.takes:
            return
        if self._sender is None:
            self._open_tracker(run)
        if (at := self._next_moment(run)) is not None:
            if kind == "artifact":
                send = partial(self.artifact, value, name, at)
            else:
                send = partial(self.media, kind, name, value, at, **options)
            self._send_call(self._position, send, None, media=f"the {kind} {name!r}")

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._current_run = None
        if self._sender is not None:
            self._send_early()
            self._sender.end(partial(self._close_tracker, self._sent_mark, _status(run)), self.patience_s)
        self._sender = self._sent_mark = None

    def state_dict(self) -> dict[str, Any]:
        """Return how far the run has logged, and the values that wait to be sent."""
        step, number = self._before_partial or self._position
        return {"step": step, "number": number, "waiting": [] if self._sender is None else self._sender.waiting()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    # -- inside -----------------------------------------------------------------------------------------------------------------------

    def _require_run(self, what: str) -> Run:
        if self._current_run is None:
            raise AttributeError(f"{type(self).__name__}.{what} is available only during a run")
        return self._current_run

    def _ensure_open(self, run: Run) -> None:
        if self._sender is None:
            self._open_tracker(run)

    def _send_values(self, run: Run, values: dict[str, float], step: int | None) -> None:
        if (at := self._next_moment(run)) is not None:
            self._send_row(
                self._position,
                values,
                at if step is None else replace(at, step=int(step), run_step=at.step, repeated=True),
            )

    def _send_settings(self, values: Mapping[str, Any]) -> None:
        self._hand_over(Item(partial(self.describe, flat(values))))

    def _hand_over(self, item: Item) -> None:
        if self._early is not None:
            self._early.append(item)
        elif self._sender is not None:
            self._sender.submit(item)

    def _send_early(self) -> None:
        waiting, self._early = self._early or [], None
        for item in waiting:
            self._hand_over(item)

    def _open_tracker(self, run: Run) -> None:
        self._sent_mark = SentMark(_sent_mark_file(self, run), run.id)
        self._row_step = self._sent_mark.row_step
        self.open(run)
        self._sender = Sender(type(self).__name__, self.retries, self.waiting, self.threaded)

    def _close_tracker(self, sent_mark: SentMark | None, status: str) -> None:
        try:
            self.close(status)
        finally:
            if sent_mark is not None:
                sent_mark.close()

    @property
    def count(self) -> int:
        """Number of rows and media that were sent in this run, also before a resume."""
        return 0 if self._sent_mark is None else self._sent_mark.count

    def _next_moment(self, run: Run) -> Moment | None:
        """Count a log event, and return its moment; ``None``: it was sent before."""
        if self._take_back_after is not None:
            self._take_back_rows()
        step = run.step
        self._position = step, self._position[1] + 1 if step == self._position[0] else 1
        if self._has_been_sent(self._position):
            return None
        return Moment(step, run.epoch, run.samples, time.time())

    def _take_back_rows(self) -> None:
        """Remove the rows that the run which is resumed has sent after its checkpoint."""
        assert self._take_back_after is not None
        assert self._sent_mark is not None
        assert self._sender is not None
        step = self._take_back_after[0]
        if numbers := self._sent_mark.take_back(self._take_back_after):
            self._sender.submit(Item(partial(self.take_back, step, numbers)))
        self._row_step, self._take_back_after = self._sent_mark.row_step, None

    def _has_been_sent(self, position: Position) -> bool:
        return self._training and self._sent_mark is not None and position <= self._sent_mark.sent

    def _send_row(self, position: Position, values: dict[str, float], at: Moment) -> None:
        if not self._has_been_sent(position):
            values = _printable(values)
            record = [list(position), at.values(), values]
            row_step = at.step if at.run_step is None else None
            self._send_call(
                position, partial(self.scalars, values, at), partial(self.has, values, at), record, row_step
            )

    def _send_call(
        self,
        position: Position | None,
        send: Callable[[], None],
        has: Callable[[], bool] | None,
        record: list[Any] | None = None,
        row_step: int | None = None,
        media: str = "",
    ) -> None:
        if self._sender is not None and self._sent_mark is not None:
            work = partial(_send, self._sent_mark, position if self._training else None, send, has, row_step)
            self._hand_over(Item(work, record, media))


def _printable(values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` with names that UTF-8, which files and trackers hold, can express: it has no lone surrogates."""
    return {
        name if name.isascii() else name.encode(errors="backslashreplace").decode(): value
        for name, value in values.items()
    }


def _send(
    sent_mark: SentMark,
    position: Position | None,
    send: Callable[[], None],
    has: Callable[[], bool] | None,
    row_step: int | None,
) -> None:
    """Make the call ``send``, and note it. After a kill the call is left out if the tracker has its values.

    Args:
        position: ``None`` in evaluations, which are logged each time.
        row_step: the step, if they are the run's own values.
    """
    if position is None or not (sent_mark.note_sending(position) and has is not None and has()):
        send()
    sent_mark.note_sent(position, row_step)


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's hyperparameters by name and its settings as ``fit/<name>``, without secrets, for a tracker's table of the configuration."""
    hyperparameters = flat(run.hyperparameters)
    return hyperparameters | {
        f"fit/{name}": value for name, value in flat({k: v["value"] for k, v in run.config.items()}).items()
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict, with names such as ``model/width``; lists and other values become text."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            entries |= flat(value, f"{prefix}{name}/")
        else:
            entries[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return entries


def _sent_mark_file(logger: Logger, run: Run) -> Path:
    key = hashlib.sha256(logger.state_key.encode()).hexdigest()[:12]
    return run.folder / "sent" / f"{type(logger).__qualname__}-{key}.json"


def _status(run: Run) -> str:
    if run.interrupted or isinstance(run.exception, KeyboardInterrupt):
        return "interrupted"
    return "failed" if run.exception is not None else run.result().status
