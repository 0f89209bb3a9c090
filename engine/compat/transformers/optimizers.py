"""Creates optimizers and learning rate schedules from their names, as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names
from transformers.trainer_utils import SchedulerType

from engine.utils.errors import nearest

NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of the names of parameters without weight decay, as in ``transformers.Trainer``."""
PLATEAU = SchedulerType.REDUCE_ON_PLATEAU.value
_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide the trained parameters into a group with ``weight_decay`` and one without (norms and biases). Empty groups are left out."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(NO_DECAY)))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in trained if (name in decayed) == decays],
            "weight_decay": weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


def optimizer_class(name: str) -> type[Optimizer]:
    """The class in ``torch.optim`` with this name in any case, such as ``"adamw"``, ``"sgd"`` or ``"adafactor"``.

    Raises:
        ValueError: there is no such class.
    """
    classes = {
        class_name.lower(): cls
        for class_name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if name.lower() not in classes:
        raise ValueError(
            f"optimizer={name!r} is unknown{nearest(name, classes)}; possible: {', '.join(classes)}, or a function of the parameter groups"
        )
    return classes[name.lower()]


def make_optimizer(
    optimizer: str | Callable[..., Optimizer], groups: list[dict[str, Any]], lr: float, options: Mapping[str, Any]
) -> Optimizer:
    """Create the optimizer for parameter ``groups``.

    Raises:
        ValueError: the name is unknown, or no parameter is trained.
    """
    if not groups:
        raise ValueError("no parameter of the model is trained: all have requires_grad=False")
    make: Callable[..., Optimizer] = optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
    return make(groups, lr=lr, **options)


def warmup_steps(warmup: int | float, total: int | None) -> int:
    """The number of warm-up steps, given as such or as a fraction (a float below 1) of all steps."""
    if isinstance(warmup, float) and warmup < 1:
        if total is None:
            raise ValueError(
                f"warmup={warmup} is a fraction of the training, whose length is not known: give a number of steps"
            )
        return -int(-total * warmup // 1)
    return int(warmup)


def make_schedule(
    name: str,
    optimizer: Optimizer,
    warmup: int | float,
    total: Callable[[], int],
    options: Mapping[str, Any],
    monitor: str,
) -> dict[str, Any]:
    """Create a schedule with :func:`transformers.get_scheduler`; return the dict for ``configure_optimizers``.

    Args:
        total: returns the number of optimizer steps in the whole training; called only if the schedule needs it.
        monitor: the logged value that ``"reduce_lr_on_plateau"`` follows.

    Raises:
        ValueError: the name is unknown, or the length of the training is not known.
    """
    names = [
        kind.value for kind in SchedulerType if kind.value != "greedy"
    ]  # get_scheduler has no schedule for "greedy"
    if name not in names:
        raise ValueError(f"scheduler={name!r} is unknown{nearest(name, names)}; possible: {', '.join(names)}, None")
    if name == PLATEAU:
        schedule = get_scheduler(name, optimizer, scheduler_specific_kwargs=dict(options))
        return {"scheduler": schedule, "interval": "epoch", "monitor": monitor}
    total_steps = None if name in _WITHOUT_LENGTH and not (isinstance(warmup, float) and warmup < 1) else total()
    schedule = get_scheduler(name, optimizer, warmup_steps(warmup, total_steps), total_steps, dict(options) or None)
    return {"scheduler": schedule, "interval": "step"}
