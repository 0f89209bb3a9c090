"""Building models without memory for their parameters, and initializing them module by module while they are sharded."""

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
    """Put the parameters that modules register inside the block on the meta device; shared ones stay shared, buffers keep their values."""
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
    """Whether a parameter or buffer has no values, other than those that are ``away`` on other ranks."""
    return any(t.is_meta and t not in away for t in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
    away: Container[Tensor] = (),
) -> dict[Tensor, Tensor]:
    """Allocate and initialize parameters and buffers without values on ``device``.

    Args:
        initialise: a function to call with each submodule that got memory; ``None``: the memory stays uninitialized.
        away: parameters that only other ranks keep; they are not touched.

    Returns:
        The tensors with memory, by the parameters and buffers that they have replaced.

    Raises:
        ValueError: ``initialise`` cannot initialize a module with parameters or buffers of its own.
    """
    replacements: dict[Tensor, Tensor] = {}
    for inner in module.modules():
        initialized: dict[Tensor, Tensor] = {}
        got_memory = False
        for store in (inner._parameters, inner._buffers):
            for key, tensor in store.items():
                if tensor is None or tensor in away:
                    continue
                if tensor.is_meta and tensor not in replacements:
                    replacements[tensor], got_memory = _with_memory(tensor, device), True
                elif initialise is not None:  # it has values, which are restored after `initialise`
                    real = replacements.get(tensor, tensor)
                    initialized[real] = real.detach().clone()
                store[key] = replacements.get(tensor, tensor)  # type: ignore[assignment]
        if got_memory and initialise is not None:
            initialise(inner)
            with torch.no_grad():
                for real, value in initialized.items():
                    real.copy_(value)
    return replacements


def return_freed_memory() -> None:
    """Return the C library's free memory to the system; otherwise it keeps the gaps that full tensors have left between their shards."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def initialiser(model: nn.Module) -> Callable[[nn.Module], None]:
    """The function that initializes a module of ``model``: the model's ``init_weights(module)``, or else the module's ``reset_parameters()``."""
    owner: Any = user_module(model)
    method: Any = getattr(type(owner), "init_weights", None)
    # Hugging Face's method of this name has no argument, and initializes a whole model.
    takes_module = method is not None and len(inspect.signature(method).parameters) == 2
    initialise: Callable[[nn.Module], None] = owner.init_weights if takes_module else reset
    return initialise


def reset(module: nn.Module) -> None:
    """Initialize a module by its ``reset_parameters()``.

    Raises:
        ValueError: the module has no such method.
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
