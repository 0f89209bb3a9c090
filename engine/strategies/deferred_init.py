"""Models that are built without memory for their parameters, and are initialized module by module while they are sharded."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from engine.transforms.blocks import user_module


@contextmanager
def parameters_deferred() -> Iterator[None]:
    """Inside the block, parameters that modules register go to the meta device; shared ones stay shared, buffers keep their values."""
    register = nn.Module.register_parameter
    deferred: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_deferred(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        parameter = self._parameters[name]
        if parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            return
        if parameter not in deferred:
            deferred[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        self._parameters[name] = deferred[parameter]

    nn.Module.register_parameter = register_deferred  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_deferred(module: nn.Module, away: Container[Tensor] = ()) -> bool:
    """Whether part of the module has no values, and is not ``away`` on other ranks."""
    return any(t.is_meta and t not in away for t in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
    away: Container[Tensor] = (),
) -> dict[Tensor, Tensor]:
    """Allocate and initialize parameters and buffers without values on ``device``.

    Args:
        initialise: called with each submodule that got memory; ``None``: the memory stays uninitialized.
        away: parameters that are on other ranks, and are not touched.

    Returns:
        Parameters and buffers without values, and what has replaced each.

    Raises:
        ValueError: a module with its own parameters or buffers that ``initialise`` cannot initialize.
    """
    done: dict[Tensor, Tensor] = {}
    for inner in module.modules():
        initialized: dict[Tensor, Tensor] = {}
        fresh = False
        for store in (inner._parameters, inner._buffers):
            for key, tensor in store.items():
                if tensor is None or tensor in away:
                    continue
                if tensor.is_meta and tensor not in done:
                    done[tensor], fresh = _with_memory(tensor, device), True
                elif initialise is not None:  # initialized already, perhaps by a module that shares it
                    real = done.get(tensor, tensor)
                    initialized[real] = real.detach().clone()
                store[key] = done.get(tensor, tensor)  # type: ignore[assignment]
        if fresh and initialise is not None:
            initialise(inner)
            with torch.no_grad():
                for real, value in initialized.items():
                    real.copy_(value)
    return done


def return_freed_memory() -> None:
    """Return the C library's free memory to the system: otherwise it keeps the holes that full tensors leave between their shards."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def initialiser(model: nn.Module) -> Callable[[nn.Module], None]:
    """How a model's modules are initialized: by its method ``init_weights(module)``, else by each module's ``reset_parameters()``."""
    owner: Any = user_module(model)
    method: Any = getattr(type(owner), "init_weights", None)
    # Hugging Face's has no argument, and initializes a whole model.
    takes_module = method is not None and len(inspect.signature(method).parameters) == 2
    initialise: Callable[[nn.Module], None] = owner.init_weights if takes_module else reset
    return initialise


def reset(module: nn.Module) -> None:
    """``module.reset_parameters()``.

    Raises:
        ValueError: the module has none.
    """
    method: Any = getattr(module, "reset_parameters", None)
    if method is None:
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        raise ValueError(
            f"{type(module).__name__} was built without memory and has no reset_parameters() to give {', '.join(names)} values: define it, or "
            "init_weights(self, module) in the TrainModule, which is called for each such module"
        )
    method()


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
