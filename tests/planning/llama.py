"""Llama 3.1 in plain torch, in its published sizes: what the published points and the benchmark of planning are computed for.

Grouped-query attention, rotary positions, SwiGLU, untied input and output embeddings. The model is built in ``configure_model``: planned, it
has no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from engine import TrainModule


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Of the perceptron."""
    vocabulary: int = 128256
    rotary_base: float = 500000.0

    @property
    def parameters(self) -> int:
        """By hand: two embeddings; per layer the queries and the output, keys and values, three matrices of the perceptron, two norms; a norm."""
        kv = self.kv_heads * (self.width // self.heads)
        layer = 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.hidden + 2 * self.width
        return 2 * self.vocabulary * self.width + self.layers * layer + self.width


SHAPES = {
    "8B": Shape(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336),
    "70B": Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672),
    "405B": Shape(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248),
    "tiny": Shape(layers=4, width=64, heads=4, kv_heads=2, hidden=160, vocabulary=256),
}
"""Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783), and one for the tests' fast part."""


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions on [B, T, heads, size], computed in float32."""
    length, size = x.shape[1], x.shape[-1]
    turns = base ** -(torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=x.device), turns)[:, None]  # [T, 1, size / 2]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal attention in which several query heads share one of keys and values: [B, T, width] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, self.shared, self.base = shape.width // shape.heads, shape.heads // shape.kv_heads, shape.rotary_base
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head)) for project in (self.q, self.k, self.v))
        q, k = rotated(q, self.base), rotated(k, self.base)
        k, v = (each.repeat_interleave(self.shared, dim=2) for each in (k, v))
        attended = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """SwiGLU: [B, T, width] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape, every_second: bool) -> None:
        super().__init__()
        self.every_second = every_second
        self.attention_norm = Norm(shape.width)
        self.attention = Attention(shape)
        self.perceptron_norm = Norm(shape.width)
        self.perceptron = Perceptron(shape)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.every_second and torch.is_grad_enabled()):
            return self._forward(x)
        return checkpoint(self._forward, x, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


def _contexts() -> Any:
    """Keep attention's result, what was reduced over ranks, and every second product: torchtitan's "selective"."""
    seen: dict[bool, int] = {True: 0, False: 0}
    aten = torch.ops.aten
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = operation is aten.mm.default
        seen[context.is_recompute] += product
        keep = operation in kept or (product and seen[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(TrainModule):
    """Tokens [B, T] to logits [B, T, vocabulary].

    Args:
        every_second: recompute in each layer as torchtitan's selective mode does: only every second matrix product is kept. ``Fit``'s own modes are
            ``activation_checkpointing``.
    """

    def __init__(self, shape: Shape, every_second: bool = False) -> None:
        super().__init__()
        self.shape, self.every_second = shape, every_second

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        shape = self.shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, self.every_second) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.norm, self.head]

    def parallelize(self, mesh: Any, sequence_parallel: bool = False) -> dict[str, Any]:
        """Heads and channels over the ranks; with ``sequence_parallel`` the residual path is cut along the sequence, and the logits stay cut."""
        columns = dict.fromkeys(
            ("attention.q", "attention.k", "attention.v", "perceptron.gate", "perceptron.up"), "colwise"
        )
        rows = ("attention.out", "perceptron.down")
        if not sequence_parallel:
            blocks = columns | dict.fromkeys(rows, "rowwise")
            ends: dict[str, Any] = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
        else:
            gathered = partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            blocks = {
                **columns,
                **{name: RowwiseParallel(output_layouts=Shard(1)) for name in rows},
                **{name: gathered() for name in ("attention", "perceptron")},
                **{f"{name}_norm": SequenceParallel() for name in ("attention", "perceptron")},
            }
            ends = {
                "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
            }
        return ends | {f"layers.*.{name}": style for name, style in blocks.items()}

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for part in self.pipeline_stages():
            x = part(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def tokens(rows: int, length: int) -> Sequence[Tensor]:
    """A loader of one batch: ``rows`` sequences of ``length`` tokens and the token after them."""
    return [torch.zeros(rows, length + 1, dtype=torch.long)]
