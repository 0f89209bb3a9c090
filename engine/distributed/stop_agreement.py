"""How the ranks agree to stop, and on news of one of them, without a collective in every step."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.group import Group

PERIOD_S = 0.5
"""All ranks see a request to stop after about this long (s), or one step when steps are slower. A check costs 2 ms on busy cores."""
MAX_INTERVAL = 256
"""Maximum steps between two checks: bounds the delay when steps suddenly become slow."""

STOP, HURRY, TERMINATE = 1, 2, 3
"""Requests: stop when the minimum is reached; at the next batch (Ctrl-C); at the next batch and end the process (SIGTERM)."""


class Stopwatch:
    """Measures the seconds of a training on this rank, including the time before a resume."""

    __slots__ = ("_started", "seconds_before")

    def __init__(self) -> None:
        self.seconds_before = 0.0
        """Seconds of the training before it was resumed here."""
        self._started = time.monotonic()

    def seconds_here(self) -> float:
        """Seconds since the run began or resumed in this process."""
        return time.monotonic() - self._started

    def seconds(self) -> float:
        """Seconds of the training."""
        return self.seconds_before + time.monotonic() - self._started


class Agreement:
    """The ranks' agreement on two flags, a request to stop with its urgency, and news: after any rank has set one, it becomes true on every rank
    at the same call.

    All ranks make the same calls in the same order. The interval between two checks follows the slowest rank's steps, from
    values that the check itself has reduced, so that all ranks compute the same interval.

    Args:
        group: the ranks.
        stopwatch: this rank's seconds of training.
    """

    __slots__ = (
        "_cpu",
        "_interval",
        "_left",
        "_news",
        "_posted",
        "_slowest_s",
        "_stop",
        "_stopwatch",
        "elapsed_s",
        "level",
        "news",
    )

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        self._cpu, self._stopwatch = group.cpu, stopwatch
        self.elapsed_s = 0.0
        """The maximum of the ranks' seconds of training at the last check: a time that is the same on all ranks."""
        self.level = 0
        """The highest request at the last check: :data:`STOP`, :data:`HURRY`, :data:`TERMINATE`, or 0."""
        self.news = False
        """Whether some rank has news (:meth:`notify`), for the caller to act upon and to clear; the same on all ranks."""
        self._interval = self._left = 1
        self._stop = 0
        self._slowest_s = 0.0
        self._news = False
        self._posted: tuple[Any, torch.Tensor] | None = None
        """The check that was not read yet: its work, and the flags that it reduces."""

    def notify(self) -> None:
        """Make :attr:`news` true on all ranks at their next check: this rank has news. Any thread may call this.

        A run reads it at the end of a step, and then announces its checkpoints (``Run.announce_checkpoints``).
        """
        if self._cpu is None:
            self.news = True
        else:
            self._news = True

    @property
    def interval(self) -> int:
        """Steps between two checks, 1 to ``MAX_INTERVAL``; the same on all ranks."""
        return self._interval

    def poll(self, stop: int, step_s: float) -> bool:
        """Call once per step with this rank's request; returns whether all ranks stop now.

        A request is kept until the next check, so it may be passed in one step only. One process gets the answer at once. A check does not wait for
        other ranks: its answer is read by the next call. Only in slow steps, which are all checked, the answer comes at once.

        Args:
            stop: 0, or :data:`STOP`, :data:`HURRY`, :data:`TERMINATE`.
            step_s: how long a step takes (s), by the latest that was measured.
        """
        if self._cpu is None:
            self.level = stop
            return stop > 0
        if stop > self._stop:
            self._stop = stop
        if step_s > self._slowest_s:
            self._slowest_s = step_s
        self._left -= 1
        if self._posted is not None:
            return self._read()
        if self._left > 0:
            return False
        at_once = self._interval == 1
        self._start_check()
        return self._read() if at_once else False

    def restart(self) -> None:
        """Check at the next call, and recompute the interval: steps may take another time from now on."""
        self._finish_check()
        self._interval = self._left = 1

    def agree_now(self, stop: int) -> bool:
        """Agree now (blocks for all ranks) whether any rank requests a stop. For ends of epochs and of validation."""
        if self._cpu is None:
            self.level = stop
            return stop > 0
        self._stop = max(self._stop, stop)
        self._finish_check()
        self._start_check()
        return self._read()

    def _finish_check(self) -> None:
        """Read the answer of a check that was begun, and pass its request on to the next check."""
        if self._posted is not None and self._read():
            self._stop = max(self._stop, self.level)

    def _start_check(self) -> None:
        """Begin a check: reduce this rank's flags over all ranks."""
        assert self._posted is None
        # An infinite duration would make the interval's division meaningless; NaN never passes poll's comparison.
        news, self._news = float(self._news), False  # news of another thread that comes now are for the next check
        values = [float(self._stop), min(self._slowest_s, 1e6), self._stopwatch.seconds(), news]
        flags = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._cpu, async_op=True)
        self._posted = work, flags
        self._stop, self._slowest_s, self._left = 0, 0.0, self._interval

    def _read(self) -> bool:
        """The answer of the check that was begun; waits for the last rank to begin it."""
        assert self._posted is not None
        (work, flags), self._posted = self._posted, None
        work.wait()
        stop, slowest_s, self.elapsed_s, news = flags.tolist()
        if news:
            self.news = True
        if slowest_s > 0.0:  # no step since the last check: the interval stays
            passed = self._interval - self._left
            # At most four times the last interval: the first durations after a change may not be typical.
            self._interval = max(1, min(MAX_INTERVAL, 4 * self._interval, round(PERIOD_S / slowest_s)))
            self._left = self._interval - passed
        self.level = int(stop)
        return stop > 0.0
