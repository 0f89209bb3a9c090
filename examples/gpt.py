"""A byte-level GPT that learns the sources of Python's standard library, which every machine with Python has.

    python examples/gpt.py
    python examples/gpt.py --size gpu --precision bf16-mixed --compile blocks
    python examples/gpt.py --devices 2 --max-steps 50
    python examples/gpt.py --devices 2 --strategy pp           # or any other one: see STRATEGIES
    python examples/gpt.py --size gpu --precision fp8-mixed --compile blocks   # with pip install "fit-trainer[fp8]", on Hopper

The model is GPT-2's (pre-norm decoder, learned positions, output tied to the input embedding) over the 256 bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from callbacks import LearningRateMonitor, RichProgressBar
from engine import FSDP, Callback, DataModule, Fit, Loss, MeshParallel, Run, TrainModule

SEPARATOR = 0
"""The byte between two files; sources do not contain it."""


@dataclass(frozen=True)
class Size:
    """A model and what fits it. Lengths are in bytes, which are the tokens here."""

    layers: int
    heads: int
    width: int
    context: int
    batch_size: int
    lr: float
    max_steps: int


SIZES = {
    "laptop": Size(layers=4, heads=4, width=128, context=128, batch_size=16, lr=1e-3, max_steps=500),
    "gpu": Size(layers=12, heads=12, width=768, context=1024, batch_size=32, lr=6e-4, max_steps=2000),
}


class Chunks(Dataset[Tensor]):
    """Item i is chunk i of the text: uint8 of shape [context + 1], the last byte being the first of the next chunk."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1]


class Sources(DataModule):
    """The standard library's top-level modules, held in memory as one uint8 tensor; the last twentieth is for validation."""

    def __init__(self, context: int, batch_size: int) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = torch.frombuffer(
            bytearray(bytes([SEPARATOR]).join(file.read_bytes() for file in files)), dtype=torch.uint8
        )
        cut = len(text) * 19 // 20
        self.train, self.val = Chunks(text[:cut], self.context), Chunks(text[cut:], self.context)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.batch_size, pin_memory=torch.cuda.is_available())


class Block(nn.Module):
    """Attention and a perceptron, each on a residual path: [B, T, width] to [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # Head by head: under tensor parallel the rows of qkv are sharded, and each rank has complete heads (-1: their number).
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each [B, heads, T, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embed(nn.Module):
    """Bytes [B, T] to [B, T, width]."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class GPT(TrainModule):
    """Bytes [B, T] to logits [B, T, 256]."""

    def __init__(self, size: Size, max_steps: int) -> None:
        super().__init__()
        self.size = size
        self.max_steps = max_steps
        self.embed = Embed(size.width, size.context)
        self.layers = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        self.head.weight = self.embed.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2: additions to the residual path are scaled by their number.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order: FSDP gathers one at a time."""
        return list(self.layers)

    def pipeline_stages(self) -> list[nn.Module]:
        """The modules of ``forward``, in order: a pipeline splits them into stages."""
        return [self.embed, *self.layers, self.norm, self.head]

    def parallelize(self, mesh: Any) -> dict[str, str]:
        """The tensor parallel plan: attention by heads, the perceptron by channels, the (tied) embedding and output by bytes."""
        blocks = {"qkv": "colwise", "out": "rowwise", "up": "colwise", "down": "rowwise"}
        return {
            "embed.tokens": "embedding_rowwise", "head": "colwise_gather_output", **{f"layers.*.{name}": style for name, style in blocks.items()},
        }  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for part in self.pipeline_stages():
            x = part(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Loss:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log("val/bits_per_byte", Loss(loss.sum / math.log(2), loss.count))

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.size.lr, betas=(0.9, 0.95), fused=True)
        warmup = max(1, self.max_steps // 20)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = (step - warmup) / max(1, self.max_steps - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Loss:
        """Sum of the cross entropy, in nats, and the number of targets. The first byte of a file cannot be predicted and is left out."""
        tokens = batch.long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        counted = inputs != SEPARATOR
        targets = targets.masked_fill(~counted, -100)
        total = F.cross_entropy(
            self(inputs).flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        return Loss(total, counted.sum())


STRATEGIES: dict[str, Any] = {
    "tp_fsdp": MeshParallel(tp=2),
    "pp_ddp": MeshParallel(pp=2, dp_replicate=-1, dp_shard=1),
    "pp_fsdp": MeshParallel(pp=2),
    "fsdp_hybrid": FSDP(dp_replicate=2),
}
"""In addition to the registered names: ddp, fsdp, tp, pp, deepspeed_stage_0 to 3."""


class Throughput(Callback):
    """Tokens per second over all ranks, from step ``after`` to the last: the first steps compile and fill caches."""

    def __init__(self, tokens_per_batch: int, after: int) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.after = after
        self.tokens_per_s = math.nan
        self._batches = 0
        self._started = 0.0

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._batches == self.after:
            self._started = self._now()

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        batches = self._batches - self.after
        if batches > 0:
            ranks = run.engine.data_group.world_size  # those that see different data
            self.tokens_per_s = batches * self.tokens_per_batch * ranks / (self._now() - self._started)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT on the sources of Python's standard library.")
    parser.add_argument("--size", choices=SIZES, default="laptop")
    parser.add_argument("--strategy", default="auto", help=f"a strategy's name, or one of {', '.join(STRATEGIES)}")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, fp8-mixed, ...")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="optimizer steps (default: that of the size)")
    parser.add_argument("--compile", choices=("whole", "blocks"), help="torch.compile the model, or each of its blocks")
    parser.add_argument("--activation-checkpointing", help="full, selective, or n: every n-th block")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    size = SIZES[args.size]
    max_steps = size.max_steps if args.max_steps is None else args.max_steps
    throughput = Throughput(size.batch_size * size.context, after=min(10, max(1, max_steps // 4)))
    fit = Fit(
        strategy=STRATEGIES.get(args.strategy, args.strategy),
        precision=args.precision,
        devices=args.devices,
        max_steps=max_steps,
        gradient_clip_val=1.0,
        val_every=None,
        limit_val_batches=20,
        compile={"whole": True, "blocks": "blocks", None: False}[args.compile],
        activation_checkpointing=int(recomputed)
        if (recomputed := args.activation_checkpointing) and recomputed.isdigit()
        else recomputed,
        seed=args.seed,
        root_dir="runs/gpt",
        callbacks=[RichProgressBar(), LearningRateMonitor(), throughput],
    )
    module, data = GPT(size, max_steps), Sources(size.context, size.batch_size)
    result = fit.run(module, datamodule=data)
    metrics = fit.validate(module, datamodule=data)[0]
    if fit.is_main_process:  # every process comes here
        parameters = sum(parameter.numel() for parameter in module.parameters())
        print(
            f"{parameters / 1e6:.2f} M parameters, {result.step} steps, {metrics['val/bits_per_byte']:.3f} bits per byte in validation"
        )
        print(f"{throughput.tokens_per_s:,.0f} tokens/s")


if __name__ == "__main__":
    main()
