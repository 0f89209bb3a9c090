"""``Agreement``: the ranks of a training share requests and news between steps, in one small collective every now and then."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from engine.distributed.group import Group

PERIOD_S = 0.5
"""All ranks see a request after about this time (s), or after one step if steps are slower. A check costs 2 ms on busy cores."""
EXACT = 2**53
"""Integers below this are exact in float64."""
MAX_INTERVAL = 256
"""The maximum number of steps between two checks, which bounds the delay when steps suddenly become slow."""


class Stopwatch:
    """Measures a training's duration on this rank, including the time before a resume."""

    __slots__ = ("_started", "seconds_before")

    def __init__(self) -> None:
        self.seconds_before = 0.0
        """Seconds that the training had taken before it was resumed."""
        self._started = time.monotonic()

    def seconds_here(self) -> float:
        """Seconds since the training began or resumed in this process."""
        return time.monotonic() - self._started

    def seconds(self) -> float:
        """Seconds that the whole training has taken so far, those before a resume included."""
        return self.seconds_before + time.monotonic() - self._started


class Compared(ABC):
    """State that must be the same on all ranks, in two numbers that an :class:`Agreement` compares with each check."""

    @abstractmethod
    def numbers(self) -> tuple[float, float]:
        """Two integers below 2**53, which are equal on all ranks if the state is. They must not wait for a device."""

    @abstractmethod
    def values(self) -> int:
        """A checksum of values on the device, which is 0 on all ranks where none are compared. It waits for the device."""

    @abstractmethod
    def warn_of_values(self) -> None:
        """Compare the values themselves, because their checksums differ, and warn. All ranks call this together."""

    @abstractmethod
    def compare(self) -> None:
        """Compare the state itself, because the numbers differ. All ranks call this together.

        Raises:
            CheckError: it differs; raised on all ranks.
        """


class Agreement:
    """Shares two things between ranks: a request, with its urgency, and news. After any rank has given one, every rank sees it at the same call.

    A run's requests are those to stop (:class:`engine.loop.stopping.StopControl`), and its news are of checkpoints that are complete or deleted
    (:class:`engine.loop.run_checkpoints.RunCheckpoints`); one collective carries both, each rank's seconds of training, and the
    numbers of :attr:`compared`.

    All ranks make the same calls in the same order. The interval between two checks follows the slowest rank's steps, from
    values that the check itself has reduced over the ranks, so that all ranks compute the same interval.

    Args:
        group: the ranks.
        stopwatch: this rank's seconds of training.
    """

    __slots__ = (
        "_cpu",
        "_interval",
        "_own_news",
        "_posted",
        "_request",
        "_slowest_s",
        "_steps_left",
        "compared",
        "elapsed_s",
        "group",
        "level",
        "news",
        "stopwatch",
    )

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        self.group, self.stopwatch, self._cpu = group, stopwatch, group.cpu
        self.elapsed_s = 0.0
        """The maximum over the ranks of the seconds of training, at the last check: a time that is the same on all ranks."""
        self.level = 0
        """The urgency of the most urgent request at the last check; 0: there was none."""
        self.news = False
        """Whether some rank has called :meth:`notify`; the same on all ranks. The reader acts on it and sets it to False."""
        self.compared: Compared | None = None
        """State that is compared with each check; the same kind on all ranks."""
        self._interval = self._steps_left = 1
        self._request = 0
        self._slowest_s = 0.0
        self._own_news = False
        self._posted: tuple[Any, torch.Tensor] | None = None
        """The check in progress: its asynchronous collective, and the flags that this reduces; ``None`` if there is none."""

    def notify(self) -> None:
        """Make :attr:`news` true on all ranks at the next check. Any thread may call this.

        A run reads :attr:`news` at the end of a step, and then announces its checkpoints (``Run.announce_checkpoints``).
        """
        if self._cpu is None:
            self.news = True
        else:
            self._own_news = True

    @property
    def interval(self) -> int:
        """The number of steps between two checks, 1 to ``MAX_INTERVAL``; the same on all ranks."""
        return self._interval

    def poll(self, request: int, step_s: float) -> bool:
        """Pass this rank's request once per step; returns whether all ranks see a request now.

        A request is kept until the next check, so it need be passed in one step only. A check does not wait for other ranks: the next call reads the
        answer. When steps are slow, every step is checked and the answer is immediate, as it is with one process.

        Args:
            request: its urgency; 0: no request.
            step_s: the latest measured duration of a step (s).
        """
        if self._cpu is None:
            self.level = request
            return request > 0
        if request > self._request:
            self._request = request
        if step_s > self._slowest_s:
            self._slowest_s = step_s
        self._steps_left -= 1
        if self._posted is not None:
            return self._read()
        if self._steps_left > 0:
            return False
        at_once = self._interval == 1
        self._start_check()
        return self._read() if at_once else False

    def restart(self) -> None:
        """Check at the next call and recompute the interval, because the duration of steps may change now."""
        self._finish_check()
        self._interval = self._steps_left = 1

    def agree_now(self, request: int) -> bool:
        """Return whether any rank has a request, waiting for all ranks. For the ends of epochs and of validations; the values of :attr:`compared` are
        compared, too."""
        if self._cpu is None:
            self.level = request
            return request > 0
        self._request = max(self._request, request)
        self._finish_check()
        self._start_check(with_values=True)
        return self._read()

    def _finish_check(self) -> None:
        """Wait for the check in progress, if there is one. A request that it has found is repeated in the next check, so that no rank loses it."""
        if self._posted is not None and self._read():
            self._request = max(self._request, self.level)

    def _start_check(self, with_values: bool = False) -> None:
        """Begin a check: start to reduce the flags over all ranks. ``with_values``: compare values on the device, too."""
        assert self._posted is None
        # Limited, since an infinite duration would make the interval's division meaningless. NaN never passes the comparison in poll.
        # A notify() of another thread between the two counts for the next check.
        own_news, self._own_news = (
            float(self._own_news),
            False,
        )
        values = [float(self._request), min(self._slowest_s, 1e6), self.stopwatch.seconds(), own_news]
        if self.compared is not None:
            numbers = [*self.compared.numbers(), float(self.compared.values() % EXACT if with_values else 0)]
            values += [*numbers, *(-number for number in numbers)]  # a maximum and, of the negative numbers, a minimum
        flags = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._cpu, async_op=True)
        self._posted = work, flags
        self._request, self._slowest_s, self._steps_left = 0, 0.0, self._interval

    def _read(self) -> bool:
        """Return the answer of the check in progress; waits until the last rank has begun it."""
        assert self._posted is not None
        (work, flags), self._posted = self._posted, None
        work.wait()
        request, slowest_s, self.elapsed_s, news, *numbers = flags.tolist()
        if self.compared is not None:
            *differ, values_differ = (a != -b for a, b in zip(numbers[:3], numbers[3:], strict=True))
            if any(differ):
                self.compared.compare()
            if values_differ:
                self.compared.warn_of_values()
        if news:
            self.news = True
        if slowest_s > 0.0:  # no step since the last check: the interval stays
            passed = self._interval - self._steps_left
            # At most four times the last interval: the first durations after a change may not be typical.
            self._interval = max(1, min(MAX_INTERVAL, 4 * self._interval, round(PERIOD_S / slowest_s)))
            self._steps_left = self._interval - passed
        self.level = int(request)
        return request > 0.0
