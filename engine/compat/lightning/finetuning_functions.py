"""The functions of Lightning's ``BaseFinetuning`` that may be called on the class, where no callback of a run keeps account."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from engine.callbacks import BaseFinetuning
from engine.utils.log import logger

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The batch norms, of which there are lazy ones too, which are subclasses."""
Modules = nn.Module | Iterable[nn.Module]


class _OnClass:
    """A function that the class has under this name; objects have the method of the next class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type) -> Any:
        return self._function if instance is None else getattr(super(self._owner, instance), self._name)


def make_trainable(modules: Modules) -> None:
    """Unfreeze the parameters of ``modules``; batch norms among them compute running statistics again."""
    for module in BaseFinetuning.flatten_modules(modules):
        if isinstance(module, NORMS):
            module.track_running_stats = True
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)


def freeze_module(module: nn.Module) -> None:
    """Freeze the parameters of ``module`` itself; a batch norm keeps its running statistics."""
    if isinstance(module, NORMS):
        module.track_running_stats = False
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)


def freeze(modules: Modules, train_bn: bool = True) -> None:
    """Freeze the parameters of ``modules``; ``train_bn``: batch norms among them are trained."""
    for module in BaseFinetuning.flatten_modules(modules):
        if isinstance(module, NORMS) and train_bn:
            make_trainable(module)
        else:
            freeze_module(module)


def filter_on_optimizer(optimizer: Any, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that ``optimizer`` does not have yet; a warning tells of others."""
    optimized_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = list(params)
    new = [parameter for parameter in parameters if id(parameter) not in optimized_ids]
    if len(new) < len(parameters):
        logger.warning(
            "%d parameters are in a group of the optimizer already, and are not added", len(parameters) - len(new)
        )
    return new


def unfreeze_and_add_param_group(
    modules: Modules, optimizer: Any, lr: float | None = None, initial_denom_lr: float = 10.0, train_bn: bool = True
) -> None:
    """Unfreeze ``modules``, and add the parameters that ``optimizer`` does not have yet as a group with the rate ``lr``, by default the first
    group's divided by ``initial_denom_lr``."""
    make_trainable(modules)
    new = filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True))
    if new:
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else float(lr)
        optimizer.add_param_group({"params": new, "lr": rate})


class FinetuningFunctions:
    """Lightning's static methods: on the class these functions, on a callback its own methods, which also keep batch norms frozen in a training."""

    freeze = _OnClass(freeze)
    make_trainable = _OnClass(make_trainable)
    unfreeze_and_add_param_group = _OnClass(unfreeze_and_add_param_group)
    freeze_module = staticmethod(freeze_module)
    filter_on_optimizer = staticmethod(filter_on_optimizer)
