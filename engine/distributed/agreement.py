"""The ranks agree to stop, and on news of one of them, without a collective in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.distributed.group import Group

PERIOD_S = 0.5
"""All ranks see a request to stop after about this long (s), or one step when steps are slower. A check costs 2 ms on busy cores."""
MAX_INTERVAL = 256
"""Maximum steps between two checks: bounds the delay when steps suddenly become slow."""

STOP, HURRY, TERMINATE = 1, 2, 3
"""Requests: stop when the minimum is reached; at the next batch (Ctrl-C); at the next batch and end the process (SIGTERM)."""


class Agreement:
    """Flags that become true on every rank at the same call after any rank has set them: a request to stop, with its urgency, and news.

    All ranks make the same calls in the same order. The interval between two checks follows the slowest rank's steps, from
    values that the check itself has reduced, so that all ranks compute the same one.
    """

    __slots__ = ("_cpu", "_interval", "_left", "_news", "_slowest_s", "_stop", "clock", "elapsed_s", "level", "news")

    def __init__(self, group: Group) -> None:
        self._cpu = group.cpu
        self.clock: Callable[[], float] = lambda: 0.0
        """This rank's seconds of training."""
        self.elapsed_s = 0.0
        """The maximum of the ranks' clocks at the last check: a time that is the same on all ranks."""
        self.level = 0
        """The highest request at the last check: :data:`STOP`, :data:`HURRY`, :data:`TERMINATE`, or 0."""
        self.news = False
        """Some rank has news (:meth:`notify`), for the caller to act upon and to clear; the same on all ranks."""
        self._interval = self._left = 1
        self._stop = 0
        self._slowest_s = 0.0
        self._news = False

    def notify(self) -> None:
        """This rank has news: :attr:`news` becomes true on all ranks at their next check. Any thread may call this."""
        if self._cpu is None:
            self.news = True
        else:
            self._news = True

    @property
    def interval(self) -> int:
        """Steps between two checks, 1 to ``MAX_INTERVAL``; the same on all ranks."""
        return self._interval

    def poll(self, stop: int, elapsed_step_s: Callable[[], float]) -> bool:
        """Call once per step with this rank's request; returns whether all ranks stop now.

        A request is kept until the next check, so it may be passed in one step only. One process gets the answer at once.

        Args:
            stop: 0, or :data:`STOP`, :data:`HURRY`, :data:`TERMINATE`.
            elapsed_step_s: gives the step's duration (s); called on several ranks only.
        """
        if self._cpu is None:
            self.level = stop
            return stop > 0
        if stop > self._stop:
            self._stop = stop
        if (seconds := elapsed_step_s()) > self._slowest_s:
            self._slowest_s = seconds
        self._left -= 1
        return self._check() if self._left <= 0 else False

    def restart(self) -> None:
        """Steps may take another time from now on: check at the next call, and recompute the interval."""
        self._interval = self._left = 1

    def now(self, stop: int) -> bool:
        """Agree now (blocks for all ranks) whether any rank requests a stop. For ends of epochs and of validation."""
        if self._cpu is None:
            self.level = stop
            return stop > 0
        self._stop = max(self._stop, stop)
        return self._check()

    def _check(self) -> bool:
        # An infinite duration would make the interval's division meaningless; NaN never passes poll's comparison.
        news = float(self._news)
        flags = torch.tensor([float(self._stop), min(self._slowest_s, 1e6), self.clock(), news], dtype=torch.float64)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._cpu)
        stop, slowest_s, self.elapsed_s, any_news = flags.tolist()
        if news:
            self._news = False  # what came in the meantime is there when the caller acts
        if any_news:
            self.news = True
        if slowest_s > 0.0:  # no step since the last check: the interval stays
            # At most four times the last interval: the first durations after a change may not be typical.
            self._interval = max(1, min(MAX_INTERVAL, 4 * self._interval, round(PERIOD_S / slowest_s)))
        self._left = self._interval
        self._stop, self._slowest_s = 0, 0.0
        self.level = int(stop)
        return stop > 0.0
