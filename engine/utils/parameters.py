"""The parameters of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The optimizers' parameters, each once."""
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        first: list[Tensor] = optimizers[0].param_groups[0]["params"]
        return first
    return list({id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}.values())
