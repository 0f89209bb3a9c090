"""The result of ``configure_optimizers`` in one form: a list of optimizers and a list of schedules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engine.utils.errors import nearest
from engine.utils.parameters import parameters_of


def _step(scheduler: Any, metric: Any) -> None:
    scheduler.step(metric)


@dataclass(slots=True)
class Schedule:
    """A learning rate scheduler, and when it steps."""

    scheduler: Any
    interval: str = "epoch"
    """``"epoch"``: at the end of epochs, after validation. ``"step"``: after optimizer steps that were applied."""
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
        if self.interval not in ("epoch", "step"):
            hint = nearest(self.interval, ("epoch", "step"))
            raise ValueError(f"lr_scheduler interval={self.interval!r} is unknown{hint}; possible: 'epoch', 'step'")
        if isinstance(self.frequency, bool) or not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(f"lr_scheduler frequency={self.frequency!r} must be an int of at least 1")
        if not callable(getattr(self.scheduler, "step", None)):
            raise TypeError(f"lr_scheduler has no step(): got {type(self.scheduler).__name__}")
        self.numbered = callable(getattr(self.scheduler, "step_update", None)) and _needed(self.scheduler.step) == [
            "epoch"
        ]
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)
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
        if self.numbered:
            unit = "epoch" if getattr(self.scheduler, "t_in_epochs", self.interval == "epoch") else "step"
            if unit != self.interval:
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
            number: steps or epochs, by ``interval``, that the training has finished.

        Raises:
            ValueError: the monitored metric was not logged; the message lists the logged ones.
        """
        if self.step is not None and not self.reduce_on_plateau:
            self.step(self.scheduler, None)
        elif self.numbered:
            metric = None if self.monitor is None else metrics.get(self.monitor)
            (self.scheduler.step if self.interval == "epoch" else self.scheduler.step_update)(number, metric)
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


class Modes:
    """Switches optimizers that have ``train()`` and ``eval()``, such as schedule-free ones, between training and evaluation weights.

    A run trains with the training weights, and evaluates, saves and ends with the evaluation weights. Meanwhile the training weights are
    kept in the optimizer's state, saved with it, and restored bit for bit: neither evaluation nor saving changes the training.
    """

    KEPT = "training_weights"

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self.switched = [o for o in optimizers if all(callable(getattr(o, name, None)) for name in ("train", "eval"))]
        self._training = False

    @contextmanager
    def training(self) -> Iterator[None]:
        """Use the training weights inside the block, and the evaluation weights after it, also after an error."""
        self._train()
        try:
            yield
        finally:
            self._eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the evaluation weights inside the block, and the previous weights after it."""
        was_training = self._training
        self._eval()
        try:
            yield
        finally:
            if was_training:
                self._train()

    @torch.no_grad()
    def _train(self) -> None:
        self._training = True
        for optimizer in self.switched:
            optimizer.train()
            for parameter in parameters_of([optimizer]):
                weights = optimizer.state.get(parameter, {}).pop(self.KEPT, None)
                if weights is not None:
                    parameter.copy_(weights)

    @torch.no_grad()
    def _eval(self) -> None:
        for optimizer in self.switched if self._training else ():
            for parameter in parameters_of([optimizer]):
                if optimizer.state.get(parameter):
                    optimizer.state[parameter][self.KEPT] = parameter.detach().clone()
        self._training = False
        for optimizer in self.switched:
            optimizer.eval()


class OptimizerSet:
    """The prepared optimizers of a run and their learning rate schedules; empty before the run's setup."""

    def __init__(self) -> None:
        self.fill([], [], automatic=True)

    def fill(self, optimizers: list[Any], schedules: list[Schedule], automatic: bool) -> None:
        """Set the optimizers and schedules. In manual optimization (not ``automatic``) the module steps the schedulers."""
        self.optimizers, self.schedules = optimizers, schedules
        self.modes = Modes(optimizers)
        """Switches the optimizers between training and evaluation weights."""
        self.step_schedules = [schedule for schedule in schedules if schedule.interval == "step"] if automatic else []
        """The schedules that advance with optimizer steps."""


def counters(optimizer: Any) -> set[str]:
    """Names of entries in parameter groups that are the optimizer's own counters: unlike hyperparameters, its constructor does not take them."""
    return set(optimizer.defaults) - set(inspect.signature(type(optimizer)).parameters)


def configured(result: Any) -> tuple[list[Optimizer], list[Schedule]]:
    """The optimizers and schedules in a result of ``configure_optimizers``, which may have any of Lightning's forms.

    Raises:
        TypeError, ValueError: the result has another form, or an optimizer has no parameters to train.
    """
    optimizers, schedules = _parse(result)
    if len({id(o) for o in optimizers}) < len(optimizers):
        raise ValueError("configure_optimizers returned the same optimizer twice")
    for optimizer in optimizers:
        if not any(p.requires_grad for p in parameters_of([optimizer])):
            raise ValueError(
                f"{type(optimizer).__name__} has no parameters to train: it was given none, or only frozen ones (requires_grad=False)"
            )
    return optimizers, schedules


def _parse(result: Any) -> tuple[list[Optimizer], list[Schedule]]:
    if result is None:
        return [], []
    if isinstance(result, Mapping):
        return _entry(result)
    if not isinstance(result, (list, tuple)):
        return [_optimizer(result)], []
    if len(result) == 2 and isinstance(result[0], (list, tuple)):
        schedulers = result[1] if isinstance(result[1], (list, tuple)) else [result[1]]
        return [_optimizer(o) for o in result[0]], [_schedule(s) for s in schedulers]
    if all(isinstance(part, Mapping) for part in result):
        entries = [_entry(part) for part in result]
        return [o for optimizers, _ in entries for o in optimizers], [s for _, schedules in entries for s in schedules]
    return [_optimizer(o) for o in result], []


def _entry(entry: Mapping[str, Any]) -> tuple[list[Optimizer], list[Schedule]]:
    possible = ("optimizer", "lr_scheduler", "monitor")
    for key in entry:
        if key not in possible:
            raise ValueError(
                f"configure_optimizers: unknown key {key!r}{nearest(key, possible)}; possible: {', '.join(possible)}"
            )
    if "optimizer" not in entry:
        raise ValueError('configure_optimizers: a dict needs the key "optimizer"')
    schedules = []
    if entry.get("lr_scheduler") is not None:
        scheduler = entry["lr_scheduler"]
        if not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": entry.get("monitor")}
        schedules.append(_schedule(scheduler))
    return [_optimizer(entry["optimizer"])], schedules


def _optimizer(optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"configure_optimizers returned {type(optimizer).__name__}, not a torch.optim.Optimizer; possible: an optimizer, a list of them, "
            '([optimizers], [schedulers]), {"optimizer": ..., "lr_scheduler": ...}'
        )
    return optimizer


def _schedule(entry: Any) -> Schedule:
    if isinstance(entry, Mapping):
        possible = [f.name for f in fields(Schedule) if f.init]
        for key in entry:
            if key not in possible:
                raise ValueError(
                    f"configure_optimizers: unknown key {key!r} in lr_scheduler{nearest(key, possible)}; possible: {', '.join(possible)}"
                )
        if "scheduler" not in entry:
            raise ValueError('configure_optimizers: an lr_scheduler dict needs the key "scheduler"')
        return Schedule(**entry)
    if not isinstance(entry, LRScheduler) and not callable(getattr(entry, "step", None)):
        raise TypeError(f"configure_optimizers returned {type(entry).__name__}, not a learning rate scheduler")
    return Schedule(entry)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step evaluates the loss itself: its ``closure`` has no default (LBFGS), or it steps in two halves (SAM)."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = bool(parameters) and parameters[0].name == "closure" and parameters[0].default is inspect.Parameter.empty
    return required or all(callable(getattr(optimizer, half, None)) for half in ("first_step", "second_step"))
