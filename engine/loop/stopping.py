"""How a training ends: limits, requests to stop, Ctrl-C and SIGTERM, and the agreement of the ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from types import FrameType

from engine.config.duration import NEVER, Duration, Unit
from engine.config.settings import Settings
from engine.distributed.agreement import Agreement
from engine.distributed.early_signals import EarlySignals
from engine.distributed.watchdog import SetupWatch
from engine.loop.clock import TrainingClock
from engine.loop.state import TrainState
from engine.utils.errors import TERMINATED
from engine.utils.log import logger

_OTHERS = ("epochs", "steps", "seconds")
"""The units of ``max_duration`` for which there are limits of their own."""
STOP, HURRY, TERMINATE = 1, 2, 3
"""How urgent a request to stop is: once ``min_epochs`` and ``min_steps`` are reached; at the next batch (Ctrl-C); at the next batch, and the process
ends (SIGTERM)."""


class Preempted(Exception):
    """Raised by Ctrl-C or SIGTERM during an evaluation: all ranks leave the evaluation at the same batch, without results."""


class StopControl:
    """Decides when a run ends, by its limits and by requests to stop on which the ranks agree.

    Args:
        settings: the settings of the run.
        state: the run's counters, the same object throughout the run.
        agreement: the run's agreement between ranks, which carries the requests.
        clock: the run's count of samples and tokens.
    """

    def __init__(self, settings: Settings, state: TrainState, agreement: Agreement, clock: TrainingClock) -> None:
        self._settings, self._state, self._group, self._clock = settings, state, agreement.group, clock
        self.agreement, self.stopwatch = agreement, agreement.stopwatch
        self.reason = ""
        """The reason why the training ended or is about to end, as text; empty while it goes on."""
        self.request: str | None = None
        """The reason for which this rank has asked to stop, on which the ranks then agree; ``None``: it has not asked."""
        self.urgency = 0
        """The urgency of :attr:`request`: :data:`STOP`, :data:`HURRY` or :data:`TERMINATE`; 0: no request."""
        self.interrupted = False
        """Whether Ctrl-C was pressed, on any rank."""
        self.terminated = False
        """Whether any rank has got SIGTERM."""
        self.preempted = False
        """Whether the ranks have agreed to end early because of Ctrl-C or SIGTERM."""
        self.early_signals = EarlySignals()
        """Sees SIGTERM even while the main thread waits in native code, for the watchdog."""
        length = settings.max_duration
        self.max_epochs: int | None = smaller_limit(settings.max_epochs, length, "epochs")
        self.max_steps: int | None = smaller_limit(settings.max_steps, length, "steps")
        self.max_time = settings.max_time
        """The time at which the training ends; ``None``: no such limit."""
        if length is not None and length.unit == "seconds":
            self.max_time = min((length, self.max_time or length), key=lambda time: time.value)
        units = ("steps", "seconds") if length is None or isinstance(length.value, float) else _OTHERS
        self.max_length = None if length is None or length.unit in units else length
        """A limit in samples, tokens or a fraction of an epoch; ``None``: there is none, or it is one of the others."""
        self.first_step_done = False
        """Whether the first step is done, so that ``timeout`` applies instead of ``start_timeout``."""
        self.due_step = 0
        """The next step after which something may be due: a limit, validation, publishing, garbage collection."""
        self.due_samples = NEVER
        """The number of samples after which something may be due that counts in samples."""
        self.due_tokens = NEVER
        """The number of tokens after which something may be due that counts in tokens, where the clock knows them after each step."""
        self.below_min_steps = False
        """Whether ``min_steps`` is not reached yet; the same on all ranks."""
        self.waiting: list[str] = []
        """The reasons of this rank's requests to stop that wait until ``min_epochs`` and ``min_steps`` are reached."""
        self.asked: str | None = None
        """The reason of this rank's first request to stop that need not wait, also if a signal comes before it is met; ``None``: there is none."""
        self.resumes_killed = False
        """Whether the run that is resumed had not come to its end, as far as its record says."""
        self.resumes_stop = False
        """Whether the training that is resumed was asked to stop, on any rank, and had not come to its end."""
        self.epoch_is_cut = False
        """Whether the training stops early and has ended its epoch, which is not complete: validation, hooks and values of its end are done."""
        self.passed_before = False
        """Whether the training before a resume had reached a limit of this run already, so that nothing is trained."""
        self._is_early = False
        self._setup_watch: SetupWatch | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, including those before a resume; with several ranks, the value on which they agreed last."""
        return self.agreement.elapsed_s if self._group.world_size > 1 else self.stopwatch.seconds()

    @property
    def stops_early(self) -> bool:
        """Whether the training ends because of a request or ``max_time``, rather than at another limit or because of a signal."""
        return self._is_early and not self.preempted

    @property
    def may_stop(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached."""
        settings, state = self._settings, self._state
        return state.finished_epochs >= (settings.min_epochs or 0) and state.step >= (settings.min_steps or 0)

    def set_limit(self, name: str, value: int | None) -> None:
        """Set the limit ``name`` of the training (``"max_epochs"`` or ``"max_steps"``) to ``value``; ``None``: no limit. All ranks call this."""
        setattr(self, name, value)
        self.due_step = 0  # checks the new limit after the current step

    def ask(self, reason: str, urgency: int = STOP) -> None:
        """Ask to stop the training after this step.

        A request with the urgency ``STOP`` waits until ``min_epochs`` and ``min_steps`` are reached; the request of a signal does not. Several ranks
        stop at the next step at which they agree (about 0.5 s later).
        """
        if urgency == STOP and not self.may_stop:
            if reason not in self.waiting:
                minimum = {"min_epochs": self._settings.min_epochs, "min_steps": self._settings.min_steps}
                waits_for = ", ".join(f"{name}={value}" for name, value in minimum.items() if value is not None)
                logger.info("%s: the training continues until %s", reason, waits_for)
                self.waiting.append(reason)
            return
        if urgency == STOP and self.asked is None:
            self.asked = reason
        if self.request is None or urgency > self.urgency:
            self.request, self.urgency = reason, max(urgency, self.urgency)

    def ask_postponed(self) -> None:
        """Make the request that came first before ``min_epochs`` and ``min_steps``, once these are reached."""
        if self.waiting and self.may_stop:
            self.ask(self.waiting[0])
            self.waiting.clear()

    def withdraw(self, reason: str) -> None:
        """Withdraw the request with this ``reason``, if it waits for ``min_epochs`` and ``min_steps``."""
        if reason in self.waiting:
            self.waiting.remove(reason)

    def agree_now(self) -> bool:
        """Find out whether any rank has asked to stop, and if so stop; return whether. A collective: every rank calls this at the same place."""
        if not self.agreement.agree_now(self.urgency):
            return False
        self.accept()
        return True

    def accept(self) -> None:
        """Record that all ranks have agreed to stop."""
        level = self.agreement.level
        self.preempted, self.terminated = self.preempted or level >= HURRY, self.terminated or level >= TERMINATE
        self.interrupted = self.interrupted or level == HURRY
        if not self.reason:
            reasons_elsewhere = {
                HURRY: "interrupted (Ctrl-C on another rank)",
                TERMINATE: "terminated (SIGTERM on another rank)",
            }
            self.reason = self.request or reasons_elsewhere.get(level, "another rank asked to stop")
            self._is_early = True

    def limit_reached(self, epoch_batches: int | None, before: bool = False, epochs: Fraction | None = None) -> bool:
        """Return whether the training ends here, by a limit or because the ranks have agreed to stop; a limit sets :attr:`reason`.

        Args:
            epoch_batches: the number of this rank's micro-batches in an epoch; ``None``: unknown.
            before: the run has resumed a training and has not trained yet, so the earlier run has reached the limit.
            epochs: the epochs trained so far, if :attr:`max_length` is a fraction of epochs.
        """
        if self.reason:
            return True
        reached = "was reached before, nothing left to train" if before else "reached"
        state, max_time, length = self._state, self.max_time, self.max_length
        if epoch_batches == 0:
            self.reason = "limit_train_batches=0 reached"
        elif self.max_steps is not None and state.step >= self.max_steps:
            self.reason = f"max_steps={self.max_steps} {reached}"
        elif self.max_epochs is not None and state.finished_epochs >= self.max_epochs:
            self.reason = f"max_epochs={self.max_epochs} {reached}"
        elif length is not None and self._length_reached(length, epochs):
            self.reason = f"max_duration={length} {reached}"
        elif max_time is not None and self.elapsed_s >= max_time.value and self.may_stop:
            self.reason = f"max_time={max_time} {reached}"
            self._is_early = True
        self.passed_before = before and bool(self.reason) and epoch_batches != 0
        return bool(self.reason)

    def _length_reached(self, length: Duration, epochs: Fraction | None) -> bool:
        if length.unit == "epochs":
            return epochs is not None and epochs >= length.exact
        return self._clock.count(length.unit, self._state.step) >= length.value

    def find_length(self) -> tuple[int, int, int]:
        """The next step, the number of samples and that of tokens at which :attr:`max_length` can be reached."""
        step, length = self._state.step, self.max_length
        if length is None:
            return NEVER, NEVER, NEVER
        if length.unit == "epochs":
            return step + 1, NEVER, NEVER
        amount = int(length.value) if self._clock.is_exact(length.unit) else NEVER
        samples, tokens = (amount if length.unit == unit else NEVER for unit in ("samples", "tokens"))
        return self._clock.next_step(length.unit, step), samples, tokens

    def end_set_up(self) -> None:
        """Stop watching the set-up of the run: its batches begin, which a watchdog watches."""
        if self._setup_watch is not None:
            self._setup_watch.stop()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Inside the block, Ctrl-C and SIGTERM end the run after the step; a second Ctrl-C at once. The user's own handlers stay in place. Until
        :meth:`end_set_up` the set-up is watched."""
        owner, is_main_thread = os.getpid(), threading.current_thread() is threading.main_thread()
        pressed = False  # on this rank; `interrupted` is true on all ranks after a Ctrl-C on one

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True
            if os.getpid() != owner:  # a data worker must go on, since the run reads from it until the step ends
                return
            self.interrupted = True
            self.ask("interrupted (Ctrl-C)", HURRY)
            if self._group.is_main:
                logger.warning("Ctrl-C: the run ends after this step; press it again to end at once")

        def terminate(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a fork of this process runs no loop that could end after a step
                os._exit(TERMINATED)
            self.early_signals.note()
            if self.urgency < TERMINATE:  # a launcher and a scheduler may both send SIGTERM
                self.terminated = True
                self.ask("terminated (SIGTERM)", TERMINATE)
                logger.warning("SIGTERM: the run ends after this step, with exit code %d", TERMINATED)

        handlers = [(signal.SIGINT, signal.default_int_handler, interrupt), (signal.SIGTERM, signal.SIG_DFL, terminate)]
        replaced = [
            (number, before, handler)
            for number, before, handler in handlers
            if is_main_thread and signal.getsignal(number) is before
        ]
        for number, _, handler in replaced:
            signal.signal(number, handler)
        try:
            with self.early_signals if replaced else nullcontext():
                self._setup_watch = SetupWatch(self.early_signals)
                try:
                    yield
                finally:
                    self.end_set_up()
        finally:
            for number, before, _ in replaced:
                signal.signal(number, before)


def smaller_limit(limit: int | None, length: Duration | None, unit: Unit) -> int | None:
    """The smaller one of a limit in ``unit`` and ``max_duration``, if that is a whole number of this unit."""
    if length is None or length.unit != unit or not isinstance(length.value, int):
        return limit
    return length.value if limit is None else min(limit, length.value)
