"""What all loggers share: when values are sent, by which thread, and what happens when a tracker fails."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from engine import Callback, Run

_log = logging.getLogger("engine")


@dataclass(frozen=True)
class Moment:
    """When values were logged."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """From 0."""
    time: float
    """Seconds since 1970."""


class Logger(Callback):
    """Subclass it and define :meth:`open`, :meth:`scalars` and :meth:`close`.

    All of them run on the main process only: ``open`` in ``setup``, where an error ends the run before its first step, the others in order in a
    thread of their own, so that a slow tracker does not slow the training down. One that fails is tried again, ``retries`` times
    and ever later; then the error is logged, and the run continues without this logger. While a tracker does not answer, up to
    ``waiting`` values wait for it; later ones are left out, with a warning. At the end of the run the rest is sent, for at most
    ``patience_s`` seconds.

    A resumed run repeats the steps after its checkpoint, exactly. What a logger has sent is noted in the run's folder (``sent/<key>``), and is
    not sent again.
    """

    logs = True
    critical = False

    def __init__(self, *, retries: int = 3, waiting: int = 10_000, patience_s: float = 30.0) -> None:
        """
        Args:
            retries: how often a failed call is repeated.
            waiting: values that may wait to be sent.
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
        self._sender: _Sender | None = None
        self._sent: _Sent | None = None

    # -- to define ----------------------------------------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Open what belongs to ``run``; ``run.id`` is the same as before if it is resumed."""

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        """Send ``values``, which were logged ``at`` this moment."""

    def close(self, status: str) -> None:
        """Close it. ``status``: ``"completed"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""

    # -- events of the run ----------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if not run.is_main_process:
            return
        self.open(run)
        self._sender = _Sender(type(self).__name__, self.retries, self.waiting)
        self._sent = _Sent(run.folder / "sent" / self.state_key)

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        if self._sent is not None:
            self._sent.start(run.step)

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self._sender is None or self._sent is None:
            return
        if (number := self._sent.next(step)) is not None:
            at = Moment(step, run.epoch, time.time())
            self._sender.put(partial(self._send, self._sent, dict(metrics), at, number))

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if self._sender is not None:
            status = "failed" if run.exception is not None else run.result().status
            self._sender.end(partial(self.close, status), self.patience_s)
        self._sender = self._sent = None

    def _send(self, sent: _Sent, values: Mapping[str, float], at: Moment, number: int) -> None:
        self.scalars(values, at)
        sent.note(at.step, number)


class _Sender:
    """A thread that makes calls in order."""

    def __init__(self, name: str, retries: int, waiting: int) -> None:
        self._name, self._retries = name, retries
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(waiting)
        self._gone = threading.Event()  # nothing more is sent
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name=f"fit-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make this call soon."""
        if self._gone.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                _log.warning("%s does not keep up: values are left out", self._name)

    def end(self, close: Callable[[], None], patience_s: float) -> None:
        """Make the waiting calls, then ``close``; give up after ``patience_s``."""
        deadline = time.monotonic() + patience_s
        for call in (close, None):
            try:
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
            except queue.Full:
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._gone.set()
            _log.error("%s did not answer within %g s: what it had not sent is lost", self._name, patience_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._gone.is_set():
                self._make(call)

    def _make(self, call: Callable[[], None]) -> None:
        for attempt in range(self._retries + 1):
            try:
                call()
                return
            except Exception as error:
                if attempt < self._retries and not self._gone.wait(min(2.0**attempt, 30.0)):
                    continue
                self._gone.set()
                _log.exception("%s failed; the run continues without it: %s", self._name, error)
                return


class _Sent:
    """How far a run's values were sent: step, and how many times values were sent at this step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = _last(path)
        self._step, self._number = -1, 0
        self._skips = False

    def start(self, step: int) -> None:
        """The training begins, or resumes, at this step."""
        self._skips = step > 0
        if not self._skips:
            self._last = (-1, 0)
            self._path.unlink(missing_ok=True)

    def next(self, step: int) -> int | None:
        """The number of the values that come now among those of this step, from 1; ``None``: they were sent before."""
        self._step, self._number = step, self._number + 1 if step == self._step else 1
        return None if self._skips and (step, self._number) <= self._last else self._number

    def note(self, step: int, number: int) -> None:
        """These were sent; a kill of the process does not lose this."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, json.dumps([step, number]).ljust(40).encode() + b"\n", 0)
        finally:
            os.close(descriptor)


def _last(path: Path) -> tuple[int, int]:
    try:
        step, number = json.loads(path.read_text())
        return int(step), int(number)
    except (OSError, ValueError, TypeError):
        return -1, 0
