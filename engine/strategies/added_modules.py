"""Detects modules and parameters added after a strategy has sharded the model: their gradients would not be reduced."""

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
    """The modules and parameter names that a model had when it was sharded.

    Args:
        who: the strategy, for the error.
    """

    def __init__(self, model: nn.Module, who: str) -> None:
        self._model, self._called, self._who = user_module(model), model, who
        self._take(self._model)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of the model is another model

    def watch(self) -> RemovableHandle:
        """A hook that checks at each forward pass with gradients."""
        return self._called.register_forward_pre_hook(lambda *_: self.check() if torch.is_grad_enabled() else None)

    def check(self) -> None:
        """Check each module, without traversing the model.

        Raises:
            ValueError: there are new trained parameters.
        """
        # The parameter objects change all the time: full ones and shards alternate.
        if (
            all(map(is_, self._expected, chain.from_iterable(self._views)))
            and list(map(len, self._parameters)) == self._counts
        ):
            return
        new = [
            name
            for name, p in _owned(self._model)
            if p[1].requires_grad and (name not in self._names or id(p[0]) not in self._known)
        ]
        if new:
            shown = ", ".join(new[:6]) + (f" and {len(new) - 6} more" if len(new) > 6 else "")
            raise ValueError(
                f"{self._who} sharded {type(self._model).__name__} before these parameters were added, and no rank would reduce their "
                f"gradients: {shown}. Add modules in __init__ or configure_model and freeze them until they are needed "
                "(requires_grad), or use strategy='ddp', which follows such changes"
            )
        self._take(self._model)

    def _take(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._known = {id(m) for m in modules}
        self._names = {name for name, _ in _owned(model)}
        self._modules = modules  # kept alive, so that no other object gets one of these ids
        self._views: list[Any] = [*(m._modules.values() for m in modules), _END]
        self._parameters = [m._parameters for m in modules]
        self._counts = list(map(len, self._parameters))
        self._expected = list(chain.from_iterable(self._views))


def _nothing() -> None:
    return None


def _owned(model: nn.Module) -> list[tuple[str, tuple[nn.Module, nn.Parameter]]]:
    """``(name, (module, parameter))`` of all parameters, shared ones each time."""
    return [
        (f"{prefix}.{name}" if prefix else name, (module, parameter))
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
