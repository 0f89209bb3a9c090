"""Models and optimizers of jobs besides the plain ones: those whose states are lent, quantized or sharded in a way of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from training import Net

from engine import optim

WIDTH = 64
"""torchao quantizes the state of tensors from 4,096 elements on."""


class Muon(Net):
    """Hidden matrices are trained by Muon, which is lent whole ones where they are sharded."""

    def make_optimizers(self) -> list[Any]:
        matrices, rest = optim.split(self)
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.02)]


class QuantizedState(Net):
    """The optimizer has its state in 8 bits, and is lent whole tensors where they are sharded."""

    def build(self) -> None:
        super().build()
        self.wide = nn.Sequential(
            nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )

    def blocks(self) -> list[nn.Module]:
        return [*super().blocks(), self.wide]

    def features(self, x: Any) -> Any:
        return self.wide(super().features(x))

    def make_optimizers(self) -> list[Any]:
        from torchao.optim import AdamW8bit

        return [AdamW8bit(self.parameters(), lr=0.02, block_size=256)]


class LowRank(nn.Module):
    """A layer in 4 bits of bitsandbytes, and beside it two matrices that are trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        whole = nn.Linear(width, width, bias=False)
        self.base = Linear4bit(width, width, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        self.base.load_state_dict({"weight": whole.weight.detach()})
        self.base.to("cpu")  # quantizes
        self.a, self.b = nn.Parameter(torch.randn(4, width) * 0.1), nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + x @ self.a.t() @ self.b.t()).relu()


class QuantizedBase(Net):
    """Matrices of low rank are trained beside frozen weights in 4 bits (QLoRA)."""

    def build(self) -> None:
        self.blocks_ = nn.ModuleList(nn.Sequential(LowRank(WIDTH)) for _ in range(2))
        self.first, self.drop, self.head = nn.Linear(8, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 3)

    def features(self, x: Any) -> Any:
        return super().features(self.first(x))

    def make_optimizers(self) -> list[Any]:
        return [torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)]


MODELS: dict[str, type[Net]] = {
    "plain": Net,
    "Muon": Muon,
    "8-bit AdamW": QuantizedState,
    "4-bit base": QuantizedBase,
}
"""By the name in ``Setup.model``."""
