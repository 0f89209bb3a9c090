"""Optimizers that draw random numbers in their steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Noisy(Optimizer):
    """SGD whose step adds numbers of torch, numpy and Python to each parameter; ``drawn`` has torch's first number of each step."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.drawn: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        value, first = None, []
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.add_(p.grad, alpha=-group["lr"])
                part: Tensor = p.to_local() if isinstance(p, DTensor) else p
                noise = torch.randn_like(part)
                first.append(noise.flatten()[0].item() if noise.numel() else 0.0)
                part.add_(noise + random.random() + numpy.random.rand(), alpha=0.01)
        self.drawn.append(first[0])
        return value
