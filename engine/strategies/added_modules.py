"""Modules and parameters that a model was given after a strategy had divided it among the ranks: nothing would share their gradients."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.transforms.blocks import user_module

_END = (object(),)


class Divided:
    """The modules and parameters' names that a model had when it was divided.

    Args:
        who: the strategy, for the error.
    """

    def __init__(self, model: nn.Module, who: str) -> None:
        self._model, self._called, self._who = user_module(model), model, who
        self._take(self._model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the model is another model

    def watch(self) -> RemovableHandle:
        """Check at each forward pass with gradients."""
        return self._called.register_forward_pre_hook(lambda *_: self.check() if torch.is_grad_enabled() else None)

    def check(self) -> None:
        """One look at each module, without a walk.

        Raises:
            ValueError: there are trained parameters that were not there.
        """
        # The parameters themselves change all the time: whole ones and parts take turns.
        if all(map(is_, self._expected, chain.from_iterable(self._views))) and list(map(len, self._parameters)) == self._counts:
            return
        new = [name for name, p in _owned(self._model) if p[1].requires_grad and (name not in self._names or id(p[0]) not in self._known)]
        if new:
            shown = ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")
            raise ValueError(
                f"{self._who} divided {type(self._model).__name__} among the ranks before these parameters were added, whose gradients no rank "
                f"would share: {shown}. Add modules in __init__ or configure_model and freeze them until they are needed "
                "(requires_grad), or use strategy='ddp', which follows such changes"
            )
        self._take(self._model)

    def _take(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._known = {id(m) for m in modules}
        self._names = {name for name, _ in _owned(model)}
        self._modules = modules  # alive, so that no other object gets one of these ids
        self._views: list[Any] = [*(m._modules.values() for m in modules), _END]
        self._parameters = [m._parameters for m in modules]
        self._counts = list(map(len, self._parameters))
        self._expected = list(chain.from_iterable(self._views))


def _nothing() -> None:
    return None


def _owned(model: nn.Module) -> list[tuple[str, tuple[nn.Module, nn.Parameter]]]:
    """``(name, (module, parameter))`` of all that are there, shared ones each time."""
    return [
        (f"{prefix}.{name}" if prefix else name, (module, parameter))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
