"""The norms of a model's gradients by parameter, before a step."""

from __future__ import annotations

from typing import Any

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
