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

from engine.step.named_schedules import lr_schedule, needs_length, warmup_steps
from engine.utils.errors import nearest

NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of the names of parameters without weight decay, as in ``transformers.Trainer``."""
PLATEAU = SchedulerType.REDUCE_ON_PLATEAU.value
_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt")
_WITHOUT_WARMUP = (SchedulerType.CONSTANT.value, PLATEAU)
_OWN_NAMES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
"""The schedules of transformers that :func:`engine.lr_schedule` has, with its names."""


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


def make_schedule(
    name: str,
    optimizer: Optimizer,
    warmup: int | float,
    total: Callable[[], int],
    options: Mapping[str, Any],
    monitor: str,
) -> dict[str, Any]:
    """Create a schedule by its name in transformers: :func:`engine.lr_schedule` has the usual ones, ``transformers.get_scheduler`` the others.

    Args:
        total: returns the number of optimizer steps in the whole training; called only if the schedule needs it.
        monitor: the logged value that ``"reduce_lr_on_plateau"`` follows.

    Returns:
        The ``lr_scheduler`` of ``configure_optimizers``.

    Raises:
        ValueError: the name is unknown, the schedule has no warm-up or no options, or the length of the training is not known.
    """
    names = [
        kind.value for kind in SchedulerType if kind.value != "greedy"
    ]  # get_scheduler has no schedule for "greedy"
    if name not in names:
        raise ValueError(f"scheduler={name!r} is unknown{nearest(name, names)}; possible: {', '.join(names)}, None")
    if warmup and name in _WITHOUT_WARMUP:
        advice = "give scheduler='constant_with_warmup'" if name != PLATEAU else "leave warmup out"
        raise ValueError(f"scheduler={name!r} has no warm-up, and warmup={warmup!r} is given: {advice}")
    if name == PLATEAU:
        schedule = get_scheduler(name, optimizer, scheduler_specific_kwargs=dict(options))
        return {"scheduler": schedule, "interval": "epoch", "monitor": monitor}
    if options and name in ("constant", "constant_with_warmup"):
        raise ValueError(f"scheduler={name!r} takes no scheduler_args, got {dict(options)}")
    own_name = _OWN_NAMES.get(name)
    total_steps = total() if name not in _WITHOUT_LENGTH or needs_length("constant", warmup) else None
    if own_name is not None and not options:
        return lr_schedule(optimizer, own_name, warmup=warmup, total_steps=total_steps)
    schedule = get_scheduler(name, optimizer, warmup_steps(warmup, total_steps), total_steps, dict(options) or None)
    return {"scheduler": schedule, "interval": "step"}
