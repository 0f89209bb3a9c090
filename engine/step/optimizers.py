"""The result of ``configure_optimizers`` in one form: a list of optimizers and a list of schedules."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from engine.step.schedules import Schedule
from engine.utils.errors import nearest
from engine.utils.parameters import parameters_of


class ReplacedStep(ABC):
    """An optimizer's ``step`` that does more than that of its class, until :meth:`undo`.

    Schedulers replace the method, too: one that was created earlier is called by the original step, and a later one calls the replacement.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._is_undone = optimizer, False
        self._original = optimizer.step
        self._attribute_before = vars(optimizer).get("step")

        @wraps(optimizer.step)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._original(*args, **kwargs) if self._is_undone else self._run(args, kwargs)

        # A method, because a scheduler that is created later takes its function.
        self._replacement = MethodType(step, optimizer)
        vars(optimizer)["step"] = self._replacement

    def undo(self) -> None:
        """Let the optimizer step as before."""
        self._is_undone, attributes = True, vars(self.optimizer)
        if attributes.get("step") is self._replacement:
            del attributes["step"]
            if self._attribute_before is not None:
                attributes["step"] = self._attribute_before

    @abstractmethod
    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Step; :attr:`_original` is the step of the class."""


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
        self.counted_schedules = [schedule for schedule in schedules if schedule.is_counted] if automatic else []
        """The schedules that follow the number of samples or tokens."""


def counters(optimizer: Any) -> set[str]:
    """Names of entries in parameter groups that are the optimizer's own counters: unlike hyperparameters, its constructor does not take them."""
    return set(optimizer.defaults) - set(inspect.signature(type(optimizer)).parameters)


def configured(
    result: Any, automatic: bool = True, unknown_keys: list[str] | None = None, frozen: list[str] | None = None
) -> tuple[list[Optimizer], list[Schedule]]:
    """The optimizers and schedules in a result of ``configure_optimizers``, which may have any of Lightning's forms.

    Args:
        automatic: whether the run steps the schedulers, and not the module.
        unknown_keys: gets a message for each unknown key of a dict, which is left out; ``None``: such a key is an error.
        frozen: gets a message for each optimizer whose parameters are all frozen; ``None``: such an optimizer is an error.

    Raises:
        TypeError, ValueError: the result has another form, an optimizer has no parameters to train or divides its state by itself, or a scheduler
            belongs to an optimizer that is not returned.
    """
    optimizers, schedules = _parse(result, unknown_keys)
    if len({id(o) for o in optimizers}) < len(optimizers):
        raise ValueError("configure_optimizers returned the same optimizer twice")
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"{type(optimizer).__name__} divides its state among the ranks by itself, so no checkpoint could have it: return the optimizer "
                "inside it, and let a strategy that shards divide the states, such as Fit(strategy='fsdp')"
            )
        if automatic and callable(getattr(optimizer, "fused_backward", None)):
            raise ValueError(
                f"{type(optimizer).__name__} steps inside of a backward pass of its own (fused_backward), where gradients are not yet those of all "
                "ranks and micro-batches, nor clipped: use another one. States of 8 bits (torchao's AdamW8bit) and strategy='fsdp' save memory, too"
            )
        if not any(p.requires_grad for p in parameters_of([optimizer])):
            message = f"{type(optimizer).__name__} has no parameters to train: it was given none, or only frozen ones (requires_grad=False)"
            if frozen is None or not parameters_of([optimizer]):
                raise ValueError(message + ". A callback that unfreezes them later has the attribute unfreezes = True")
            frozen.append(message)
    for schedule in schedules:
        _check_owner(schedule.scheduler, optimizers)
        if automatic:
            schedule.check_monitor()
    return optimizers, schedules


def _check_owner(scheduler: Any, optimizers: list[Optimizer]) -> None:
    """Check that a scheduler, with those in it, changes the rates of a returned optimizer. A wrapper shares the groups of the optimizer in it."""
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        owner = getattr(part, "optimizer", None)
        if not isinstance(owner, Optimizer):
            continue
        groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
        if not any(id(group) in groups for group in owner.param_groups):
            raise ValueError(
                f"configure_optimizers: {type(part).__name__} was made for a {type(owner).__name__} that is not returned, so it would change no "
                "learning rate of the training: make it for an optimizer that is returned, or return that optimizer too"
            )


_KEYS = ("optimizer", "lr_scheduler", "monitor")
_SCHEDULE_KEYS = tuple(field.name for field in fields(Schedule) if field.init)


def _known(
    entry: Mapping[str, Any], possible: Sequence[str], where: str, unknown_keys: list[str] | None
) -> dict[str, Any]:
    """The items of ``entry`` with possible keys.

    Raises:
        ValueError: there is another key, and ``unknown_keys`` is ``None``.
    """
    messages = [
        f"configure_optimizers: unknown key {key!r}{where}{nearest(key, possible)}; possible: {', '.join(possible)}"
        for key in entry
        if key not in possible
    ]
    if messages and unknown_keys is None:
        raise ValueError(messages[0])
    if unknown_keys is not None:
        unknown_keys += [f"{message}; it is left out" for message in messages]
    return {key: value for key, value in entry.items() if key in possible}


def _parse(result: Any, unknown_keys: list[str] | None) -> tuple[list[Optimizer], list[Schedule]]:
    if result is None:
        return [], []
    if isinstance(result, Mapping):
        return _entry(result, unknown_keys)
    if not isinstance(result, (list, tuple)):
        return [_optimizer(result)], []
    if len(result) == 2 and isinstance(result[0], (list, tuple)):
        schedulers = result[1] if isinstance(result[1], (list, tuple)) else [result[1]]
        return [_optimizer(o) for o in result[0]], [_schedule(s, unknown_keys) for s in schedulers]
    if all(isinstance(part, Mapping) for part in result):
        entries = [_entry(part, unknown_keys) for part in result]
        return [o for optimizers, _ in entries for o in optimizers], [s for _, schedules in entries for s in schedules]
    return [_optimizer(o) for o in result], []


def _entry(entry: Mapping[str, Any], unknown_keys: list[str] | None) -> tuple[list[Optimizer], list[Schedule]]:
    entry = _known(entry, _KEYS, "", unknown_keys)
    if "optimizer" not in entry:
        raise ValueError('configure_optimizers: a dict needs the key "optimizer"')
    schedules = []
    if entry.get("lr_scheduler") is not None:
        scheduler = entry["lr_scheduler"]
        if not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": entry.get("monitor")}
        schedules.append(_schedule(scheduler, unknown_keys))
    return [_optimizer(entry["optimizer"])], schedules


def _optimizer(optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"configure_optimizers returned {type(optimizer).__name__}, not a torch.optim.Optimizer; possible: an optimizer, a list of them, "
            '([optimizers], [schedulers]), {"optimizer": ..., "lr_scheduler": ...}'
        )
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"configure_optimizers returned {type(optimizer).__name__}, which has no param_groups: return the optimizer that it wraps"
        )
    return optimizer


def _schedule(entry: Any, unknown_keys: list[str] | None) -> Schedule:
    if isinstance(entry, Mapping):
        entry = _known(entry, _SCHEDULE_KEYS, " in lr_scheduler", unknown_keys)
        if "scheduler" not in entry:
            raise ValueError('configure_optimizers: an lr_scheduler dict needs the key "scheduler"')
        return Schedule(**entry)
    if not isinstance(entry, LRScheduler) and not callable(getattr(entry, "step", None)):
        raise TypeError(f"configure_optimizers returned {type(entry).__name__}, not a learning rate scheduler")
    return Schedule(entry)


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class is torch's own, and so are those that it derives from."""
    classes = type(optimizer).__mro__
    return all(cls.__module__.startswith("torch.optim") for cls in classes[: classes.index(Optimizer)])


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step evaluates the loss itself: its ``closure`` has no default (LBFGS), or it steps in two halves (SAM)."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    required = bool(parameters) and parameters[0].name == "closure" and parameters[0].default is inspect.Parameter.empty
    return required or all(callable(getattr(optimizer, half, None)) for half in ("first_step", "second_step"))


def explain_missing_graph(error: Exception) -> str:
    """Say which optimizer has asked for derivatives of gradients that have no graph, and what to do; empty if it is another error."""
    if "does not require grad and does not have a grad_fn" not in str(error):
        return ""
    trace, owner = error.__traceback__, None
    while trace is not None:
        owner, trace = trace.tb_frame.f_locals.get("self", owner), trace.tb_next
    if not isinstance(owner, Optimizer):  # a closure's backward pass, for example, belongs to another object
        return ""
    return (
        f"the step of {type(owner).__name__} differentiates gradients, which have no graph: on one process set automatic_optimization = False, call "
        "self.manual_backward(loss, create_graph=True), and step by yourself. Several ranks reduce gradients outside of their graph: use an "
        "optimizer that estimates the curvature from gradients alone, such as AdamW or SOAP"
    )
