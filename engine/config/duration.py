"""One vocabulary for lengths of a training: ``"3 epochs"``, ``"500 steps"``, ``"2e9 tokens"``, ``"10 min"``, or an int of steps."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, Protocol, overload

from engine.utils.errors import nearest

Unit = Literal["epochs", "steps", "samples", "tokens", "seconds"]

_FORMS = (
    "'3 epochs', '0.5 epochs', '500 steps', '1e6 samples', '2e9 tokens', '30 s', '10 min', '1.5 h', '2 days', 'DD:HH:MM:SS', a datetime.timedelta, "
    "an int of steps, or a float in (0, 1] as a fraction of an epoch"
)
_UNITS: dict[str, tuple[Unit, int]] = {
    **dict.fromkeys(("epoch", "epochs", "ep"), ("epochs", 1)),
    **dict.fromkeys(("step", "steps"), ("steps", 1)),
    **dict.fromkeys(("sample", "samples"), ("samples", 1)),
    **dict.fromkeys(("tok", "toks", "token", "tokens"), ("tokens", 1)),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
    **dict.fromkeys(("d", "day", "days"), ("seconds", 86400)),
}
_MOST: dict[Unit, int] = {
    **dict.fromkeys(("epochs", "steps", "samples", "tokens"), 1 << 62),
    "seconds": 100 * 365 * 86400,
}
"""The maximum of each unit. For seconds: torch counts its timeouts in nanoseconds, which in 64 bits is at most 292 years."""
_TEXT = re.compile(r"((?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*([a-z]*)")
_CLOCK = re.compile(r"([0-9]+):([0-9]{1,2}):([0-9]{1,2}):([0-9]{1,2})")


@dataclass(frozen=True)
class Duration:
    """A length of a training. Created by :func:`parse`.

    Raises:
        ValueError: the value is negative or not finite, or a fraction of a step, a sample or a token.
    """

    unit: Unit
    """The unit: ``"epochs"``, ``"steps"`` (of the optimizer), ``"samples"``, ``"tokens"`` or ``"seconds"``."""
    value: int | float
    """The number of units; whole numbers are ints. Only epochs and seconds may be fractions."""

    def __post_init__(self) -> None:
        if self.unit not in _MOST:
            raise ValueError(
                f"unit={self.unit!r}: must be 'epochs', 'steps', 'samples', 'tokens' or 'seconds'{nearest(self.unit, _UNITS)}"
            )
        if not 0 <= self.value <= _MOST[self.unit]:
            raise ValueError(f"{self.value} {self.unit}: a duration is a number from 0 to {_MOST[self.unit]}")
        if self.value == int(self.value):
            object.__setattr__(self, "value", int(self.value))
        elif self.unit not in ("epochs", "seconds"):
            raise ValueError(
                f"{self.value} {self.unit}: there is no fraction of a {self.unit[:-1]}; for a fraction of an epoch write '{self.value} epochs'"
            )

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"

    @property
    def exact(self) -> Fraction:
        """The value as the fraction that the user meant: 0.1 is 1/10."""
        return Fraction(self.value).limit_denominator(1_000_000)


LONGEST = Duration("seconds", _MOST["seconds"])
"""A time that no run reaches."""


@overload
def parse(value: None) -> None: ...
@overload
def parse(value: int | float | str | timedelta | Duration) -> Duration: ...
def parse(value: int | float | str | timedelta | Duration | None) -> Duration | None:
    """Convert ``value`` to a :class:`Duration`; ``None`` stays ``None``.

    An int is a number of steps. A float in (0, 1] is a fraction of an epoch, as in Lightning's ``val_check_interval``; larger
    ones are refused because their unit is unclear. A number as text means the same as the number.
    ``"DD:HH:MM:SS"`` is Lightning's ``max_time``.

    Raises:
        ValueError: the text or the number is not a duration; the message lists the accepted forms.
        TypeError: the value has another type.
    """
    if value is None or isinstance(value, Duration):
        return value
    if isinstance(value, timedelta):
        return Duration("seconds", value.total_seconds())
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, float):
        if 0 < value <= 1:
            return Duration("epochs", value)
        raise ValueError(f"{value!r} has no unit: give {_FORMS}")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} ({type(value).__name__}) is not a duration: give {_FORMS}")
    return Duration("steps", operator.index(value))


def _parse_text(text: str) -> Duration:
    """The duration in a text: a number with a unit, a number alone, or ``DD:HH:MM:SS``."""
    clean = text.strip().lower()
    if clock := _CLOCK.fullmatch(clean):
        days, hours, minutes, seconds = map(int, clock.groups())
        return Duration("seconds", ((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    match = _TEXT.fullmatch(clean)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: give {_FORMS}")
    number, word = match.groups()
    if word not in _UNITS and word:
        raise ValueError(f"{text!r} has the unknown unit {word!r}{nearest(word, _UNITS)}: give {_FORMS}")
    amount = Decimal(number)
    if not word and ("." in number or "e" in number):
        return parse(float(amount))
    unit, factor = _UNITS[word or "steps"]
    # Whole numbers are exact, however large; a fraction is the float that it is in Python, such as 0.1.
    return Duration(unit, (int(amount) if amount == amount.to_integral_value() else float(amount)) * factor)


NEVER = 1 << 62
"""A step, or a number of samples, that no run reaches."""


class Clock(Protocol):
    """Counts the samples and tokens of a training: :class:`engine.loop.clock.TrainingClock`."""

    def follow(self, what: str, unit: str) -> None:
        """Count in ``unit`` from now on, for what ``what`` names.

        Raises:
            ValueError: the training cannot know its samples or tokens.
        """

    def count(self, unit: Unit, step: int) -> int | float:
        """The samples or tokens in the windows that are complete, after ``step`` optimizer steps."""

    def next_step(self, unit: Unit, step: int) -> int:
        """The next step after ``step`` at which the count changes, if it changes at some steps only; else :data:`NEVER`."""

    def is_exact(self, unit: Unit) -> bool:
        """Whether the count is right after each window, rather than after the steps that :meth:`next_step` tells."""


class Every:
    """A trigger that is due once every ``duration``; never if it is ``None``.

    - steps: at each multiple of n except 0; if steps are skipped (an optimizer that steps several times per batch),
      at the first one after each multiple;
    - whole epochs: at the end of every n-th epoch;
    - fractions of an epoch: at the first step that has reached each multiple of n epochs;
    - samples and tokens: at the first step that has reached each multiple; a training says how many there are, see :meth:`follow`;
    - seconds: at the first call n seconds or more after the last time (or the start).

    Args:
        duration: a length in any form that :func:`parse` accepts; ``None``: never.
        steps_per_epoch: optimizer steps in each epoch; needed for fractions of an epoch if :meth:`due` is called without ``epochs``.

    A trigger is due at most once in a step. Ranks have different clocks: if seconds decide about a collective operation, let one
    rank decide for all.

    Raises:
        ValueError: the duration is not positive, or :func:`parse` refuses it.
    """

    def __init__(
        self, duration: int | float | str | timedelta | Duration | None, steps_per_epoch: int | None = None
    ) -> None:
        self.duration = parse(duration)
        if self.duration is not None and self.duration.value <= 0:
            raise ValueError(f"every {self.duration}: must be more than 0; give None for never")
        self.steps_per_epoch = steps_per_epoch
        """Optimizer steps in each epoch; needed for fractions of an epoch if :meth:`due` is called without ``epochs``."""
        self._last_step = -1
        self._last_s = 0.0
        self._multiples: int | None = None
        """The number of multiples of the duration that had passed at the last call; ``None``: no call yet."""
        self._interval: Any = self.duration.value if self.duration else 0
        unit = self.duration.unit if self.duration else "never"
        self.is_counted = unit in ("samples", "tokens")
        """Whether the duration is in samples or tokens, which a training's clock counts."""
        self._clock: Clock | None = None
        self._reached = {
            "never": self._never,
            "steps": self._steps,
            "epochs": self._epochs,
            "samples": self._counted,
            "tokens": self._counted,
            "seconds": self._seconds,
        }[unit]
        """The method that says whether a multiple has been reached, by the unit."""
        self.of_epochs = unit == "epochs" and isinstance(self._interval, float)
        """Whether the duration is a fraction of an epoch, for which :meth:`due` needs the epochs done."""
        if self.duration is not None and self.of_epochs:
            # 0.1 is the user's 1/10: as a float, 3 * 0.1 > 0.3 would move the trigger by a step.
            self._interval = self.duration.exact
            self._reached = self._fraction

    def __str__(self) -> str:
        return str(self.duration)

    @property
    def is_never(self) -> bool:
        """Whether the trigger is never due."""
        return self.duration is None

    @property
    def is_at_epoch_ends(self) -> bool:
        """Whether the trigger is due at ends of epochs only."""
        return self._reached == self._epochs

    @property
    def pace(self) -> Duration | None:
        """The average interval at which the trigger is due, for estimates; ``None``: never."""
        return self.duration

    def follow(self, clock: Clock, what: str = "every") -> None:
        """Count samples or tokens by a training's clock, ``run.clock``, if the duration is in one of them. Call this in ``on_train_start``.

        Args:
            what: a name for the duration, for errors.

        Raises:
            ValueError: the training cannot know its samples or tokens.
        """
        if self.is_counted and self.duration is not None:
            clock.follow(f"{what}={str(self.duration)!r}", self.duration.unit)
            self._clock = clock

    def start(self, step: int, epochs: Fraction | None = None) -> None:
        """Skip the multiples up to this step. No effect after :meth:`load_state_dict`, which restores how many have passed."""
        can_count = (
            self._reached == self._steps
            or (self._reached == self._fraction and (epochs is not None or self.steps_per_epoch))
            or (self.is_counted and self._clock is not None)
        )
        if can_count and self._multiples is None:
            self._reached(step, None, 0.0, epochs)

    def due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None = None) -> bool:
        """Check whether the event is due now.

        Args:
            step: optimizer steps done so far.
            epoch_end: the number of finished epochs if an epoch has just ended, else ``None``.
            elapsed_s: seconds since the start of the run.
            epochs: epochs done so far, for fractions of an epoch.

        Raises:
            ValueError: the duration is a fraction of an epoch, and neither ``epochs`` nor ``steps_per_epoch`` is given.
        """
        if not self._reached(step, epoch_end, elapsed_s, epochs) or step == self._last_step:
            return False
        self._last_step, self._last_s = step, elapsed_s
        return True

    def is_due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None = None) -> bool:
        """Whether :meth:`due` would return true now. The trigger stays as it is. ``step``, ``epoch_end``, ``elapsed_s``, ``epochs``: as there."""
        before = self._last_step, self._last_s, self._multiples
        try:
            return self.due(step, epoch_end, elapsed_s, epochs)
        finally:
            self._last_step, self._last_s, self._multiples = before

    def keep_due(self) -> None:
        """Make the trigger due again, also after a resume, because the action for which it was due was interrupted."""
        self._last_step, self._last_s = -1, 0.0
        if self._multiples:
            self._multiples -= 1

    def next_step(self, step: int) -> int:
        """The first step after ``step`` at which the trigger can be due, apart from the ends of epochs: :meth:`due` need not be called before that
        step."""
        if self._reached == self._steps:
            count = step // self._interval if self._multiples is None else self._multiples
            return max(step + 1, (count + 1) * int(self._interval))
        if self._clock is not None and self.duration is not None:
            return self._clock.next_step(self.duration.unit, step)
        return NEVER if self._reached in (self._never, self._epochs) else step + 1

    @property
    def next_samples(self) -> int:
        """The number of samples of the training at which the trigger can be due; :data:`NEVER`: its duration is in another unit."""
        return self._next_count("samples")

    @property
    def next_tokens(self) -> int:
        """The number of tokens of the training at which the trigger can be due; :data:`NEVER`: its duration is in another unit, or losses count the
        tokens, for which :meth:`next_step` tells the next log boundary."""
        return self._next_count("tokens")

    def _next_count(self, unit: Unit) -> int:
        if self._clock is None or self.duration is None or self.duration.unit != unit or not self._clock.is_exact(unit):
            return NEVER
        return ((self._multiples or 0) + 1) * int(self._interval)

    def state_dict(self) -> dict[str, Any]:
        """The step and the time at which the trigger was last due, and the number of multiples that have passed."""
        return {
            "last_step": self._last_step,
            "last_s": self._last_s,
            "count": self._multiples,
            "every": str(self.duration),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` that :meth:`state_dict` returned."""
        self._last_step, self._last_s = int(state["last_step"]), float(state["last_s"])
        # With another duration the saved number of multiples means nothing.
        count = state.get("count") if state.get("every") == str(self.duration) else None
        self._multiples = None if count is None else int(count)

    def _never(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        return False

    def _steps(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        return self._has_reached_multiple(step // self._interval, (step - 1) // self._interval, step)

    def _epochs(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        return epoch_end is not None and epoch_end > 0 and epoch_end % self._interval == 0

    def _fraction(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        if epochs is not None:
            return self._has_reached_multiple(epochs // self._interval, epochs // self._interval, step)
        if not self.steps_per_epoch:
            raise ValueError(
                f"every {self.duration}: the length of an epoch is unknown; give steps or a time, or a loader with a length"
            )
        length = self._interval * self.steps_per_epoch
        return self._has_reached_multiple(step // length, (step - 1) // length, step)

    def _counted(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        if self.duration is None or self._clock is None:
            raise ValueError(
                f"every {self.duration}: only a training knows its {'' if self.duration is None else self.duration.unit}: call "
                "every.follow(run.clock) in on_train_start"
            )
        if step == self._last_step:  # the steps since were skipped: the multiple counts at the next one
            return False
        count = int(self._clock.count(self.duration.unit, step) // self._interval)
        return self._has_reached_multiple(count, 0, step)

    def _has_reached_multiple(self, count: int, previous_count: int, step: int) -> bool:
        """Whether ``count`` multiples are more than at the last call, or at the first call more than ``previous_count``; never at step 0."""
        if self._multiples is not None:
            previous_count = self._multiples
        self._multiples = count
        return step > 0 and count > previous_count

    def _seconds(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None) -> bool:
        if elapsed_s < self._last_s:  # a resumed or repeated run whose clock started again
            self._last_s = 0.0
        return bool(elapsed_s - self._last_s >= self._interval)
