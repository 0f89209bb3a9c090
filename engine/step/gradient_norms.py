"""The norms of a model's gradients by parameter, before a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.step.gradients import gradients
from engine.step.optimizer_step import Stepper
from engine.utils.parameters import parameters_of


def named_norms(stepper: Stepper, model: nn.Module, norm_type: float, optimizers: list[Any]) -> dict[str, Tensor]:
    """The norm of each gradient, divided and unscaled, by the parameter's name. Shapes ``()``, on the device.

    ``optimizers``: only of their parameters; if empty, of all.
    """
    own = {id(p) for p in parameters_of(optimizers)}
    named = {n: p for n, p in model.named_parameters() if p.grad is not None and (not optimizers or id(p) in own)}
    stepper.readable(list(named.values()))
    return stepper.strategy.norms({name: gradients([p])[0] for name, p in named.items()}, norm_type)


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's gradient as it is now, in this process, and of all together; names as in Lightning.

    :func:`named_norms` is for gradients that are still sharded, scaled or not divided by their window.
    """
    kind = float(norm_type)
    each = {n: p.grad.detach().norm(kind) for n, p in module.named_parameters() if p.grad is not None}
    found = {f"grad_{kind}_norm{group_separator}{name}": norm for name, norm in each.items()}
    return found | ({f"grad_{kind}_norm_total": torch.stack([*each.values()]).norm(kind)} if each else {})
