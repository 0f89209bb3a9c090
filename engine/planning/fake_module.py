"""A copy of a module whose parameters and buffers have shapes but no values; the module itself stays as it is."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.planning import torch_private
from engine.utils.tree import map_tensors

Module = TypeVar("Module", bound=nn.Module)


def fake_module(module: Module) -> Module:
    """A deep copy with fake tensors on the CPU. Tensors on the meta device stay there; shared ones stay shared.

    To be called within a :class:`engine.planning.simulation.Simulation`.
    """
    memo: dict[int, Any] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise ValueError(
                f"{type(module).__name__}.{name} is a ScriptModule ({inner.original_name}), whose operations a plan cannot see: plan with the module "
                "that it was made from, before torch.jit.script or torch.jit.trace"
            )
        for tensor in (*inner._parameters.values(), *inner._buffers.values(), *vars(inner).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = fake_tensor(tensor)
    kept = list(memo)
    while True:
        try:
            return copy.deepcopy(module, memo)
        except Exception:
            shared = _not_copied(module, memo)
            if not shared:
                raise
            memo = {key: memo[key] for key in kept}
            memo.update({id(value): value for value in shared})
            kept = list(memo)


def fake_tensor(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, layout and kind without values; a tensor on the meta device, or without values, itself. Small integers keep
    their values: indices of positions, pointers into a queue."""
    if tensor.is_meta:
        with torch_private.real():
            without = torch.empty_like(tensor)
            return nn.Parameter(without, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else without
    if torch_private.is_fake(tensor):
        return tensor
    if is_lazy(tensor):  # has no shape yet
        return copy.deepcopy(tensor)
    if not isinstance(tensor, nn.Parameter) and torch_private.has_host_numbers(tensor):
        with torch_private.real():
            return tensor.detach().to("cpu", copy=True)
    made = (
        torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if tensor.layout is torch.strided
        else torch.empty(tensor.size(), dtype=tensor.dtype)
    )
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(made, tensor.requires_grad)
        parameter.__dict__.update(
            {name: value for name, value in vars(tensor).items() if not isinstance(value, Tensor)}
        )
        return parameter
    return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made


def make_fake(module: nn.Module) -> None:
    """Replace what has values in a module (of its own, made by its hooks), in place."""
    done: dict[int, Tensor] = {}
    for inner in module.modules():
        for store in (inner._parameters, inner._buffers):
            for key, tensor in store.items():
                if tensor is not None and not tensor.is_meta and not torch_private.is_fake(tensor):
                    store[key] = done.setdefault(id(tensor), fake_tensor(tensor))  # type: ignore[assignment]


def fake_batch(batch: Any) -> Any:
    """A batch with fake tensors; small ones of integers (tokens, lengths, masks) keep their values, so that code may read them."""
    return map_tensors(_fake_input, batch)


def _fake_input(tensor: Tensor) -> Tensor:
    return fake_tensor(tensor.detach() if torch_private.has_host_numbers(tensor) else tensor)


def _not_copied(module: nn.Module, memo: dict[int, Any]) -> list[Any]:
    """Attributes of a module that cannot be copied, such as locks and open files: the copy shares them."""
    found = []
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name in ("_parameters", "_buffers", "_modules") or id(value) in memo or isinstance(value, nn.Module):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                found.append(value)
    return found
