"""Learning rate schedulers whose rates are a function of their position alone, so that they can be moved to any position at once."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

_FUNCTIONS = (LambdaLR, OneCycleLR, CyclicLR)
"""The schedulers of torch that compute their rates from ``last_epoch``. The others change the rates of the step before."""
_POSITIONS = (1, 2, 3, 1000)


def is_function_of_position(scheduler: Any) -> bool:
    """Whether a scheduler's rates follow from ``last_epoch`` alone. A class of the user's is tried out: its ``get_lr`` must give the same rates
    whatever the optimizer's rates are, and must not change the scheduler."""
    kind = type(scheduler)
    if not isinstance(scheduler, LRScheduler) or kind.step is not LRScheduler.step:
        return False
    if any(kind.get_lr is function.get_lr for function in _FUNCTIONS):
        return True
    return kind.get_lr.__module__ != lr_scheduler.__name__ and all(_is_same(scheduler, at) for at in _POSITIONS)


def _is_same(scheduler: LRScheduler, position: int) -> bool:
    """Whether a scheduler of the user's gives the same rates at a position twice, with other rates of the optimizer between."""
    groups, state = scheduler.optimizer.param_groups, dict(vars(scheduler))
    before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    plain = {name: copy.copy(value) for name, value in state.items() if isinstance(value, (int, float, list, dict))}
    try:
        scheduler.last_epoch = position
        scheduler._get_lr_called_within_step = True
        rates = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for factor in (1.0, 0.5):
                for group, values in zip(groups, before, strict=True):
                    group["lr"] = (values["lr"] + 1.0) * factor
                rates.append([float(rate) for rate in scheduler.get_lr()])
        changed = {name for name, value in vars(scheduler).items() if name in plain and value != plain[name]}
        return rates[0] == rates[1] and changed <= {"last_epoch", "_get_lr_called_within_step"}
    except (ArithmeticError, IndexError, ValueError):
        return False
    finally:
        vars(scheduler).clear()
        vars(scheduler).update(state)
        for group, values in zip(groups, before, strict=True):
            group.update(values)


def move_to(scheduler: Any, position: int) -> None:
    """Set the optimizer's rates to those at ``position``; beyond the end of a ``OneCycleLR`` to its last ones."""
    if isinstance(scheduler, OneCycleLR):
        position = min(position, scheduler.total_steps)
    with suppress(AttributeError):  # torch would take a first step that was skipped for a wrong order
        scheduler.optimizer._opt_called = True
    scheduler.last_epoch = position - 1
    scheduler.step()
