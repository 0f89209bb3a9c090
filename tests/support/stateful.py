"""Optimizers whose states differ from torch's own: SGD that keeps something of each gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Keeping(Optimizer):
    """SGD with a state of the given ``kind`` for each parameter."""

    def __init__(self, parameters: Any, kind: str, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kind, self.steps = kind, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                getattr(self, f"_{self.kind}")(p, self.state[p])
                p.add_(p.grad, alpha=-group["lr"])

    def _codes(self, p: Tensor, state: dict[str, Any]) -> None:
        """Codes of 8 bits and a scale of this rank's part of the gradient; the step adds what they stand for."""
        grad, part = (t.to_local() if isinstance(t, DTensor) else t for t in (p.grad, p))
        assert grad is not None
        before = state.setdefault("codes", torch.zeros(grad.shape, dtype=torch.int8))
        state["scale"] = (grad.abs().max() / 127 if grad.numel() else grad.sum()).clone()
        before.copy_(before * 0.5 + grad / state["scale"] * 0.5)
        part.add_(before * state["scale"], alpha=-0.01)

    def _flat(self, p: Tensor, state: dict[str, Any]) -> None:
        """The first values, flattened, as Prodigy keeps them."""
        p.flatten().sub(state.setdefault("p0", p.flatten().detach().clone()))

    def _mean(self, p: Tensor, state: dict[str, Any]) -> None:
        """One number for a parameter, as Adam-mini keeps it."""
        assert p.grad is not None
        state["mean"] = p.grad.square().mean()

    def _whole(self, p: Tensor, state: dict[str, Any]) -> None:
        """The whole gradient on every rank."""
        assert p.grad is not None
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        state.setdefault("m", torch.zeros_like(grad)).mul_(0.9).add_(grad)

    def _scalar(self, p: Tensor, state: dict[str, Any]) -> None:
        """A number and a vector that are equal on all ranks, and a momentum that is sharded like the parameter."""
        assert p.grad is not None
        state["count"] = state.get("count", torch.zeros(())) + 1
        state.setdefault("table", torch.arange(3.0))
        p.add_(state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=-0.01)

    def _nested(self, p: Tensor, state: dict[str, Any]) -> None:
        """Momenta in a dict by number, a list and a tuple, sharded like the parameter, as heavyball and AggMo keep them; and counters."""
        assert p.grad is not None
        if not state:
            momenta = [torch.zeros_like(p) for _ in range(3)]
            state.update({"views": {0: {"m": momenta[0], "count": torch.zeros(1, dtype=torch.int64)}}})
            state.update(several=[momenta[1], 0.5], pair=(momenta[2], torch.zeros(1, dtype=torch.int8)))
        for momentum in (state["views"][0]["m"], state["several"][0], state["pair"][0]):
            p.add_(momentum.mul_(0.9).add_(p.grad), alpha=-0.01)
        state["views"][0]["count"] += 1
        state["pair"][1].add_(1)
        assert state["views"][0]["count"].dtype == torch.int64
        assert state["pair"][1].dtype == torch.int8

    def _beside(self, p: Tensor, state: dict[str, Any]) -> None:
        """A number and a tensor under keys that are no parameters, as MADGRAD and TRAC keep them."""
        assert p.grad is not None
        self.state["k"] = self.state.get("k", 0) + 1
        total = self.state.setdefault("total", {"sum": torch.zeros(()), 3: torch.ones(2)})["sum"].add_(1)
        p.add_(p.grad, alpha=-0.1 / (self.state["k"] + float(total)))

    def _sharded_beside(self, p: Tensor, state: dict[str, Any]) -> None:
        """The latest gradient, under the optimizer's own key."""
        self.state["latest"] = {"grad": p.grad}

    def _transposed(self, p: Tensor, state: dict[str, Any]) -> None:
        """Bases whose columns are in order in memory, as a QR decomposition returns them, in a list; and their strides."""
        grad = p.grad
        assert grad is not None
        if grad.ndim == 2:
            bases = state.setdefault("bases", [None])
            bases[0] = torch.linalg.qr(grad @ grad.T + torch.eye(len(grad))).Q
            state["stride"] = bases[0].stride()

    def _estimate(self, p: Tensor, state: dict[str, Any]) -> None:
        """A rate that each rank estimates from its own part, in the parameter group, as a Python number."""
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        assert grad is not None
        self.param_groups[0]["d"] = grad.abs().sum().item()

    def _object(self, p: Tensor, state: dict[str, Any]) -> None:
        """An object, as GaLore keeps it."""
        state.setdefault("projector", object())

    def _masters(self, p: Tensor, state: dict[str, Any]) -> None:
        """Masters in fp32 of parameters in half precision."""
        assert p.grad is not None
        p.copy_(state.setdefault("master", p.detach().float().clone()).add_(p.grad.float(), alpha=-0.001))
