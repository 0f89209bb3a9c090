"""Estimates for progress bars: how far a run is, how fast it is, and how long it will take."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import Run


MOST_LINES = 1_000
"""Largest number of epochs that all leave a line."""
MANY = 10_000
"""Largest number of epochs whose windows are looked up one by one."""
RECENT = 60
"""Seconds of training over which the rate is measured."""


@dataclass(slots=True)
class Progress:
    """Content of one bar: of an epoch, or of an evaluation."""

    title: str
    """Title of the bar: ``"epoch 1/9"``, ``"validation"``."""
    done: int
    """Optimizer steps in the epoch, or batches of the evaluation."""
    total: int | None
    """The total of ``done``; ``None``: not known."""
    fraction: float | None
    """Share of the work that is done, 0 to 1, counted in micro-batches; ``None``: not known."""
    unit: str
    """Unit of ``done`` and ``total``: ``"step"`` or ``"batch"``."""
    rate: float | None
    """Units a second; ``None``: not measured yet."""
    elapsed_s: float
    """Seconds since the epoch or the evaluation started."""
    eta_s: float | None
    """Seconds until the training (validation included) or the evaluation ends; ``None``: not known."""
    whole: str = ""
    """Position in the training, ``"step 145/1000"``; empty for an evaluation."""


class RunEstimates:
    """Measures the progress of one run with the run's counters and the clock: nothing waits for a device.

    The rate is the one of the epoch under way, without validation and without the run's first step, in which much is compiled and loaded. The
    time left is estimated from the last minute: it counts the remaining micro-batches and validations. Until a validation has been measured,
    one of its batches is taken to last as long as a micro-batch of the training.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RECENT)  # seconds of training, steps, micro-batches
        self._evaluation_s = 0.0  # seconds in evaluations
        self._epoch_began = self._eval_began = 0.0
        self._first_step = 0
        self._rate_from: tuple[float, int] | None = (
            None  # seconds of training and step from which the epoch's rate counts
        )
        self._length: int | None = None  # micro-batches of the last epoch
        self._validation_s: float | None = None
        self._eval_batch_s: float | None = None
        self._eval_lengths: list[int | None] = []  # batches of each loader of the evaluation
        self._eval_loader = 0  # index of its current loader
        # Cached: steps and micro-batches of the epochs after this one, and what they were computed from.
        self._later_work: tuple[float, float] = (0, 0)
        self._later_key: tuple[object, ...] = ()
        self.eval_name: str | None = None
        """The evaluation under way: ``"validation"``, ``"sanity check"``, ``"test"``, ``"predict"``."""
        self.eval_done = 0

    # -- events -------------------------------------------------------------------------------------------------------------------

    def begin_epoch(self, run: Run) -> None:
        """Note that an epoch starts, or continues after a resume."""
        self._epoch_began, self._first_step = self._training_clock(), run.step
        self._rate_from = (self._epoch_began, run.step) if self._recent else None

    def measure(self, run: Run) -> None:
        """Take a measurement after a micro-batch. Called before a bar is drawn."""
        now = self._training_clock()
        self._rate_from = self._rate_from or (now, run.step)
        if not self._recent or now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, run.step, run.state.batches))

    def end_epoch(self, run: Run) -> None:
        """Note that an epoch ends."""
        self._length = run.state.batch_idx

    def begin_evaluation(self, name: str, limits: list[int | None]) -> None:
        """Note that an evaluation starts. ``limits``: number of batches of each loader; ``None``: not known."""
        self.eval_name, self.eval_done, self._eval_lengths, self._eval_loader = name, 0, limits, 0
        self._eval_began = time.monotonic()

    def evaluated(self, dataloader_idx: int) -> None:
        """Count a batch of the evaluation."""
        self.eval_done += 1
        self._eval_loader = dataloader_idx

    def end_evaluation(self) -> None:
        """Note that the evaluation has ended."""
        seconds = time.monotonic() - self._eval_began
        self._evaluation_s += seconds
        if self.eval_done:
            self._eval_batch_s = seconds / self.eval_done
        if self.eval_name == "validation":
            self._validation_s = seconds
        self.eval_name = None

    # -- what is shown --------------------------------------------------------------------------------------------------------------

    def epoch(self, run: Run) -> Progress:
        """Content of the bar of the epoch under way. Epochs are numbered from 0, as in files and log lines: the last of ten is ``9/9``."""
        state, window = run.state, run.window_at(run.state.epoch)
        done, length = -(-state.batch_idx // window), run.num_train_batches
        total = None if length is None else -(-length // window)
        if run.max_steps is not None:  # which may end the epoch
            total = min(total if total is not None else run.max_steps, done + max(0, run.max_steps - run.step))
        batches = None if total is None else min(total * window, length or total * window)
        return Progress(
            title=f"epoch {state.epoch}" + ("" if run.max_epochs is None else f"/{run.max_epochs - 1}"),
            done=done,
            total=total,
            fraction=min(1.0, state.batch_idx / batches) if batches else None,
            unit="step",
            rate=self._rate(run),
            elapsed_s=self._training_clock() - self._epoch_began,
            eta_s=self._seconds_left(run),
            whole=self._training_position(run),
        )

    def epoch_rate(self, run: Run) -> float:
        """Steps a second in this epoch so far, without validation."""
        return (run.step - self._first_step) / max(self._training_clock() - self._epoch_began, 1e-9)

    def evaluation(self) -> Progress:
        """Content of the bar of the evaluation under way."""
        total = _sum_or_none(self._eval_lengths)
        elapsed = time.monotonic() - self._eval_began
        rate = self.eval_done / elapsed if self.eval_done and elapsed > 0 else None
        several = f" {self._eval_loader + 1}/{len(self._eval_lengths)}" if len(self._eval_lengths) > 1 else ""
        return Progress(
            title=f"{self.eval_name}{several}",
            done=self.eval_done,
            total=total,
            fraction=min(1.0, self.eval_done / total) if total else None,
            unit="batch",
            rate=rate,
            elapsed_s=elapsed,
            eta_s=None if rate is None or total is None else max(0, total - self.eval_done) / rate,
        )

    # -- estimates ------------------------------------------------------------------------------------------------------------------

    def _training_clock(self) -> float:
        """The clock without the time of evaluations: inside one it stands still."""
        return (self._eval_began if self.eval_name is not None else time.monotonic()) - self._evaluation_s

    def _recent_work(self, run: Run) -> tuple[float, int, int]:
        """Seconds, steps and micro-batches of the last minute of training."""
        if not self._recent:
            return 0.0, 0, 0
        seconds, step, batches = self._recent[0]
        return self._training_clock() - seconds, run.step - step, run.state.batches - batches

    def _rate(self, run: Run) -> float | None:
        """Steps a second in this epoch; until one is done, those of the last minute."""
        if self._rate_from is not None and run.step > self._rate_from[1]:
            seconds, steps = self._training_clock() - self._rate_from[0], run.step - self._rate_from[1]
        else:
            seconds, steps, _ = self._recent_work(run)
        return steps / seconds if steps and seconds > 0 else None

    def _training_position(self, run: Run) -> str:
        """Position in the training: ``"step 145/1000"``, or ``"step 145"`` if the total is not known."""
        ahead = self._work_left(run)
        return f"step {run.step}" + ("" if ahead is None else f"/{run.step + ahead[0]}")

    def _work_left(self, run: Run) -> tuple[int, int] | None:
        """Optimizer steps and micro-batches that the training has left on this rank. An epoch's last window may be a short one."""
        state, length = run.state, run.num_train_batches or self._length
        window = run.window_at(state.epoch)
        if run.control.max_length is not None:
            return self._work_of_length(run)
        steps_left = math.inf if run.max_steps is None else max(0, run.max_steps - run.step)
        epochs = math.inf if run.max_epochs is None else run.max_epochs
        if not length or steps_left == epochs == math.inf:
            return (
                None
                if steps_left == math.inf
                else (int(steps_left), max(0, int(steps_left) * window - state.batch_idx % window))
            )
        batches_left = max(0, length - state.batch_idx)
        steps = -(-(batches_left + state.batch_idx % window) // window) if batches_left else 0
        if steps >= steps_left:
            return int(steps_left), max(0, min(batches_left, int(steps_left) * window - state.batch_idx % window))
        key = state.epoch, epochs, length, steps_left - steps
        if key != self._later_key:
            self._later_key, self._later_work = (
                key,
                _whole_epochs(run, state.epoch + 1, epochs, length, steps_left - steps),
            )
        later, batches = self._later_work
        return steps + int(later), batches_left + int(batches)

    def _work_of_length(self, run: Run) -> tuple[int, int] | None:
        """Steps and micro-batches that a training with ``max_duration`` has left, also if another limit ends it before."""
        control = run.control
        total = run.loaders.total_steps(control.max_epochs, control.max_steps, control.max_length)
        samples = None if run.train_loader is None else run.train_loader.samples_of_round
        if total is None or not samples or run.control.max_length is None:
            return None
        steps, end = max(0, total - run.step), run.loaders.samples_of(run.control.max_length) or 0
        batches = max(0, -(-(end - run.samples) // samples))
        return steps, min(batches, steps * run.loaders.largest_window())

    def _seconds_left(self, run: Run) -> float | None:
        """Seconds that the training has left, with its validations; ``None``: not known."""
        seconds, _, done = self._recent_work(run)
        ahead, estimates = self._work_left(run), []
        steps, batches = ahead or (0, None)
        if batches == 0 and self.eval_name is None:
            return 0.0
        if batches is not None and done > 0 and seconds > 0:
            batch_s = seconds / done
            training_s = batches * batch_s
            validation_s = self._one_validation(run, batch_s)
            seconds_left = training_s + self._validations_left(run, steps, batches, training_s) * validation_s
            if self.eval_name == "validation":
                seconds_left += max(0.0, validation_s - (time.monotonic() - self._eval_began))
            estimates.append(seconds_left)
        if run.control.max_time is not None:
            estimates.append(max(0.0, run.control.max_time.value - run.elapsed_s))
        return min(estimates) if estimates else None

    def _one_validation(self, run: Run, batch_s: float) -> float:
        if self._validation_s is not None:
            return self._validation_s
        count = _sum_or_none(run.num_eval_batches)
        return 0.0 if count is None else count * (batch_s if self._eval_batch_s is None else self._eval_batch_s)

    def _validations_left(self, run: Run, steps: int, batches: int, training_s: float) -> int:
        """Number of validations in the next ``steps`` with ``batches`` micro-batches, which take ``training_s`` seconds."""
        every, state = run.val_every.pace, run.state
        if every is None or not run.val_loaders:
            return 0
        if every.unit == "seconds":
            return int(training_s / every.value)
        if every.unit == "steps":
            return math.floor((run.step + steps) / every.value) - math.floor(run.step / every.value)
        length = run.num_train_batches or self._length
        if not length:
            return 0
        now = state.epoch + Fraction(min(state.batch_idx, length), length)
        value = every.exact
        return math.floor((now + Fraction(batches, length)) / value) - math.floor(now / value)


def _whole_epochs(run: Run, first: int, end: float, length: int, max_steps: float) -> tuple[float, float]:
    """Steps and micro-batches of the epochs from ``first`` to before ``end``, with ``length`` micro-batches each; at most ``max_steps`` steps."""
    steps: float = 0
    batches: float = 0
    for epoch in range(first, int(min(end, first + MANY))):
        window = run.window_at(epoch)
        per_epoch = -(-length // window)
        count = 1.0 if epoch < first + MANY - 1 else end - epoch  # the last one stands for all later ones
        whole = min(count, (max_steps - steps) // per_epoch)
        steps, batches = steps + whole * per_epoch, batches + whole * length
        if whole < count:
            return max_steps, batches + (max_steps - steps) * window
    return steps, batches


def _sum_or_none(counts: list[int | None]) -> int | None:
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def epochs_per_line(run: Run) -> int:
    """Return the n of "every n-th epoch leaves a line": 1, or in runs of thousands of epochs 2, 5, 10, ..., for at most :data:`MOST_LINES`."""
    ends = [run.state.epoch + 1 if run.max_epochs is None else run.max_epochs]
    if run.max_steps is not None and run.num_train_batches:
        ends.append(-(-run.max_steps * run.window_at(run.state.epoch) // run.num_train_batches))
    epochs = (max if run.max_epochs is None else min)(ends)
    return next(n for n in _one_two_five() if epochs <= n * MOST_LINES)


def _one_two_five() -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20, 50, ..."""
    for power in count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)


def duration(seconds: float | None) -> str:
    """A duration as text: ``"0:07"``, ``"1:02:03"``, ``"2d 03:04"``; ``"-:--"`` if it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def speed(rate: float | None, unit: str) -> str:
    """A rate as text: ``"12.3 step/s"``, or ``"3.2 s/step"`` if a step takes longer than a second."""
    if rate is None or rate <= 0:
        return f"- {unit}/s"
    value, name = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{value:.0f} {name}" if value >= 1000 else f"{value:.1f} {name}"


def number(value: object) -> str:
    """A metric's value as text with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
