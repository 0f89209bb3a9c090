"""Learning rate schedulers, each with the interval, frequency and monitor by which it steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from engine.utils.errors import nearest
from engine.utils.positioned_rates import is_function_of_position, move_to

INTERVALS = ("epoch", "step", "samples", "tokens")
"""The intervals of a learning rate schedule."""


class NamedFactor(partial[float]):
    """A factor of learning rates, by the step, in a schedule that :func:`engine.lr_schedule` has created."""


def is_named(scheduler: Any) -> bool:
    """Whether :func:`engine.lr_schedule` has created ``scheduler``."""
    return any(isinstance(function, NamedFactor) for function in getattr(scheduler, "lr_lambdas", ()))


def _step(scheduler: Any, metric: Any) -> None:
    scheduler.step(metric)


@dataclass(slots=True)
class Schedule:
    """A learning rate scheduler, and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    """``"epoch"``: at the end of epochs, after validation. ``"step"``: after optimizer steps that were applied. ``"samples"``, ``"tokens"``: after
    each window, also of a skipped step, to the number of samples or tokens that the training has read."""
    frequency: int = 1
    """Step once in this many epochs or steps."""
    monitor: str | None = None
    """The metric that ``ReduceLROnPlateau`` follows."""
    strict: bool = True
    """Whether a missing ``monitor`` is an error (otherwise the update is skipped)."""
    name: str | None = None
    """Name of the schedule in learning rate loggers."""
    reduce_on_plateau: bool = False
    """Whether ``step`` takes the value of ``monitor``; always true for ``ReduceLROnPlateau``."""
    numbered: bool = field(default=False, init=False)
    """Whether the scheduler is given the number of the epoch or step, as timm's are: ``step(epoch)``, ``step_update(num_updates)``."""
    step: Callable[[Any, Any], None] | None = field(default=None, init=False, repr=False)
    """The module's ``lr_scheduler_step``, if overridden: it steps the scheduler."""

    def __post_init__(self) -> None:
        if self.interval not in INTERVALS:
            hint = nearest(self.interval, INTERVALS)
            raise ValueError(
                f"lr_scheduler interval={self.interval!r} is unknown{hint}; possible: {', '.join(map(repr, INTERVALS))}"
            )
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(f"lr_scheduler frequency={self.frequency!r} must be an int of at least 1")
        if self.frequency > 1 and self.is_counted:
            raise ValueError(
                f"lr_scheduler frequency={self.frequency} with interval={self.interval!r}: the rate follows the count at each step; leave "
                "frequency out"
            )
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(f"lr_scheduler has no step(): got {type(self.scheduler).__name__}")
        self.numbered = callable(getattr(self.scheduler, "step_update", None)) and _needed(self.scheduler.step) == [
            "epoch"
        ]
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def is_counted(self) -> bool:
        """Whether the schedule follows the number of samples or tokens."""
        return self.interval in ("samples", "tokens")

    def check_monitor(self) -> None:
        """Check that a scheduler that the run steps knows its metric, if it needs one.

        Raises:
            ValueError: there is no ``monitor``.
        """
        if self.reduce_on_plateau and self.monitor is None:
            raise ValueError(
                'ReduceLROnPlateau needs a metric: return {"scheduler": ..., "monitor": "val_loss"} for it'
            )

    def check(self) -> None:
        """Check before the first step that :meth:`advance` can step the scheduler.

        Raises:
            ValueError: the scheduler's ``step`` needs arguments that a run does not know, or counts in another unit than ``interval``.
        """
        class_name, needed = type(self.scheduler).__name__, _needed(self.scheduler.step)
        if self.is_counted and not self.numbered:
            if not is_function_of_position(self.scheduler):
                raise ValueError(
                    f"{class_name} computes each rate from the one before, or follows something else than a count, so interval={self.interval!r} "
                    f"would give other rates than it has: give LambdaLR(optimizer, lambda {self.interval}: ...), a function of the "
                    f"{self.interval} so far, such as lr_schedule's; or override lr_scheduler_step in the module"
                )
        elif self.numbered:
            unit = "epoch" if getattr(self.scheduler, "t_in_epochs", self.interval == "epoch") else "step"
            if unit != self.interval and not (unit == "step" and self.is_counted):
                raise ValueError(
                    f"{class_name} counts in {'epochs' if unit == 'epoch' else 'steps'} (t_in_epochs={unit == 'epoch'}), and its interval is "
                    f'{self.interval!r}, so it would have no effect: return {{"scheduler": ..., "interval": "{unit}"}} for it'
                )
        elif needed and not (self.reduce_on_plateau and len(needed) == 1):
            raise ValueError(
                f"{class_name}.step() needs {', '.join(needed)}, which a run does not know: give a scheduler whose step() needs nothing, or override "
                "lr_scheduler_step in the module"
            )

    def advance(self, metrics: Mapping[str, float], number: int) -> None:
        """Step the scheduler once.

        Args:
            number: steps, epochs, samples or tokens, by ``interval``, that the training has finished.

        Raises:
            ValueError: the monitored metric was not logged; the message lists the logged ones.
        """
        if self.step is not None and not self.reduce_on_plateau:
            self.step(self.scheduler, None)
        elif self.numbered:
            metric = None if self.monitor is None else metrics.get(self.monitor)
            (self.scheduler.step if self.interval == "epoch" else self.scheduler.step_update)(number, metric)
        elif self.is_counted:
            move_to(self.scheduler, number)
        elif not self.reduce_on_plateau:
            self.scheduler.step()
        elif self.monitor is not None and self.monitor in metrics:
            (self.step or _step)(self.scheduler, metrics[self.monitor])
        elif self.strict:
            raise ValueError(
                f"ReduceLROnPlateau follows {self.monitor!r}, which was not logged{nearest(self.monitor, metrics)}; "
                f"logged: {', '.join(sorted(metrics)) or 'nothing'}"
            )


def _needed(step: Any) -> list[str]:
    """Names of the arguments that a scheduler's ``step`` requires."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(step).parameters.items()
    return [
        name
        for name, parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]
