"""Questions about parameters: which ones an optimizer has, which are frozen, which are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters of the optimizers, without duplicates."""
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        parameters: list[Tensor] = optimizers[0].param_groups[0]["params"]
        return parameters
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())


def is_sharded(parameter: Tensor) -> bool:
    """Whether a rank has only a part of this parameter: it is a ``DTensor``, or has the attribute ``sharded_by`` from a strategy."""
    return hasattr(parameter, "placements") or hasattr(parameter, "sharded_by")


_AXES = {"fsdp": "dp_shard"}
"""Axes of meshes that transformers makes, and our names of them."""


def mesh_axes(parameter: Any) -> tuple[str, ...]:
    """The names of the axes of a ``DTensor``'s mesh, as :class:`engine.MeshParallel` calls them."""
    return tuple(_AXES.get(name, name) for name in parameter.device_mesh.mesh_dim_names or ())


def of_classes(module: nn.Module, classes: Sequence[str]) -> list[str]:
    """The names of the module's parameters that are of these classes, or hold a tensor of one, each with its class: ``"fc.weight (Int8Tensor)"``."""
    return [
        f"{name} ({kind})"
        for name, p in module.named_parameters()
        for kind in {type(p).__name__, type(p.data).__name__}
        if kind in classes
    ]


def frozen_except(module: nn.Module, optimizer: Any) -> list[Tensor]:
    """Freeze the module's parameters that the optimizer does not have, and return those that were not frozen before."""
    trained = {id(p) for p in parameters_of([optimizer])}
    frozen: list[Tensor] = [p for p in module.parameters() if id(p) not in trained and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s wrapper, or ``model`` itself if it is no such wrapper."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
