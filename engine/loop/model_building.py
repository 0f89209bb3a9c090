"""Builds the parts of a model that ``configure_model`` creates, with the values that the module's own ``init_weights`` gives them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine.module import TrainModule, overrides


def build_model(module: TrainModule) -> None:
    """Call ``configure_model``, then the module's own ``init_weights``, if it has one, for each module with parameters that are new.

    A ``configure_model`` that calls ``init_weights`` itself has initialized them: then it is not called again. Modules whose parameters have no
    values, because they were built on the meta device, are left for later: they get them when they get memory.
    """
    if not has_init_weights(module):
        module.configure_model()
        return
    earlier = set(module.parameters())
    with _counted_calls(module) as calls:
        module.configure_model()
    if calls:
        return
    for inner in list(module.modules()):
        new = [parameter for parameter in inner.parameters(recurse=False) if parameter not in earlier]
        if new and not any(parameter.is_meta for parameter in new):
            module.init_weights(inner)


def has_init_weights(module: TrainModule) -> bool:
    """Whether the user has defined ``init_weights(self, module)``: Hugging Face's method of this name has no argument."""
    method: Any = type(module).init_weights
    is_users = overrides(module, "init_weights") and not method.__module__.startswith("engine.")
    return is_users and len(inspect.signature(method).parameters) == 2


@contextmanager
def _counted_calls(module: TrainModule) -> Iterator[list[nn.Module]]:
    """The modules for which ``init_weights`` is called inside the block."""
    method, calls = module.init_weights, []

    def counted(inner: nn.Module) -> None:
        calls.append(inner)
        method(inner)

    vars(module)["init_weights"] = counted
    try:
        yield calls
    finally:
        vars(module).pop("init_weights", None)
