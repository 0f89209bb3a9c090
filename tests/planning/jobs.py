"""The jobs whose plans are compared with real runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, Llama
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from engine import DDP, FSDP, DeepSpeed, Loss, MeshParallel, TrainModule, optim
from engine.losses import linear_cross_entropy

WIDTH, HIDDEN, CLASSES, BATCH = 24, 50, 10, 16
WORDS = 501


class Block(nn.Module):
    """Sizes that 2 and 4 ranks do not divide evenly: 50 and 24, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(TrainModule):
    """Three blocks and a head with a buffer; ``optimizer`` gets the parameters."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.optimizer = optimizer

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def adamw(parameters: Any, **options: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


def sgd(parameters: Any, **options: Any) -> Any:
    return torch.optim.SGD(parameters, lr=1e-3, **options)


def net(optimizer: Callable[..., Any]) -> TrainModule:
    return Net(optimizer)


def rows(count: int) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, torch.arange(count) % CLASSES)


def transformer(optimizer: Callable[..., Any]) -> TrainModule:
    """The one of the parity table."""
    made: TrainModule = parity().Transformer()
    return made


class TinyLlama(Llama):
    """In its tiny size, for batches of a ``TensorDataset``; with ``sequence_parallel`` its logits stay cut over the vocabulary."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__(SHAPES["tiny"])
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


class Words(TrainModule):
    """Blocks between an embedding and an output layer of many words; ``plain``: with logits."""

    def __init__(self, optimizer: Callable[..., Any], plain: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(words, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.optimizer, self.plain = optimizer, plain

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding(x)
        for layer in self.layers:
            out = layer(out)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, targets = self(batch[0][:, :-1]), batch[0][:, 1:]
        if self.plain:
            return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        loss = linear_cross_entropy(hidden, self.head, targets, chunk=40)
        assert isinstance(loss, Loss)
        return loss.sum / targets.numel()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def words(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count * 9).view(count, 9) % WORDS)


def muon(parameters: Any, divides_work: bool = False, **options: Any) -> Any:
    """Muon for the matrices, AdamW for the rest."""
    every = list(parameters)
    matrices = torch.optim.Muon([p for p in every if p.ndim == 2], lr=1e-3)
    rest = adamw([p for p in every if p.ndim != 2], **options)
    return [optim.whole(matrices, divide_work=True) if divides_work else matrices, rest]


def tokens(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count * 9).view(count, 9) % SHAPES["tiny"].vocabulary)


def sentences(count: int) -> TensorDataset:
    table = parity()
    ids = torch.arange(count * (table.TOKENS + 1)).view(count, -1) % table.VOCAB
    return TensorDataset(ids, torch.ones(count, table.TOKENS))


@cache
def parity() -> Any:
    """``tests/parity/test_strategies.py``."""
    path = Path(__file__).parents[1] / "parity" / "test_strategies.py"
    spec = importlib.util.spec_from_file_location("parity_of_strategies", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Job:
    world_size: int
    strategy: Callable[[], Any]
    more: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = adamw
    net: Callable[[Callable[..., Any]], TrainModule] = net
    data: Callable[[int], TensorDataset] = rows

    @property
    def micro_batches(self) -> int:
        return int(self.more.get("accumulate_grad_batches", 1))

    def module(self) -> TrainModule:
        return self.net(self.optimizer)

    def settings(self) -> dict[str, Any]:
        return {"strategy": self.strategy(), **self.more}

    def loader(self) -> Any:
        return DataLoader(self.data(4 * self.world_size * BATCH * self.micro_batches), batch_size=BATCH)


TP, TOGETHER, APART = partial(MeshParallel, tp=2), partial(adamw, foreach=True), partial(sgd, momentum=0.9)
PIPELINE = partial(MeshParallel, pp=2)
CUT = partial(PIPELINE, tp=2, sequence_parallel=True, loss_parallel=True)
LLAMA: dict[str, Any] = {"net": TinyLlama, "data": tokens}
TWO_STAGES = ("interleaved", "zero_bubble", *parity().IN_A_V)
CLIPPED = {"gradient_clip_val": 0.1}
WITHOUT_LOGITS: dict[str, Any] = {"net": Words, "data": words}
BF16 = {"precision": "bf16-mixed"}


def of_deepspeed() -> dict[str, Job]:
    """Under each stage of ZeRO; on 4 ranks the parts are padded."""
    zero, one, two, three = (partial(DeepSpeed, stage=stage) for stage in range(4))
    sharded = partial(three, param_persistence_threshold=100, reduce_bucket_size=2000)
    window = {"accumulate_grad_batches": 2, **CLIPPED}
    return {
        **{f"deepspeed {each.keywords['stage']}": Job(2, each) for each in (zero, one, two, three)},
        "deepspeed 1, bf16, clipped": Job(2, one, {**BF16, **CLIPPED}),
        "deepspeed 1, sgd, window": Job(2, one, window, APART),
        "deepspeed 2, bf16, window": Job(2, two, {**BF16, **window}),
        "deepspeed 2, offload": Job(2, partial(two, offload_optimizer=True), BF16),
        "deepspeed 3, bf16, clipped": Job(2, sharded, {**BF16, **CLIPPED}),
        "deepspeed 3, full checkpointing": Job(2, sharded, {"activation_checkpointing": "full"}),
        "deepspeed 3, offload": Job(2, partial(sharded, offload_optimizer=True, offload_parameters=True), BF16),
        "four deepspeed 2, bf16": Job(4, two, BF16, net=transformer, data=sentences),
        "four deepspeed 3, bf16": Job(4, sharded, BF16),
    }


JOBS: dict[str, Job] = {
    "ddp": Job(2, DDP),
    "ddp, sgd, window": Job(2, DDP, {"accumulate_grad_batches": 2}, sgd),
    "ddp, bucket views": Job(2, partial(DDP, gradient_as_bucket_view=True), {}, APART),
    "ddp, bf16": Job(2, DDP, {"precision": "bf16-mixed"}),
    "ddp, selective checkpointing": Job(2, DDP, {"activation_checkpointing": "selective"}),
    "fsdp": Job(2, FSDP),
    "fsdp, foreach": Job(2, FSDP, CLIPPED, TOGETHER),
    "fsdp, momentum, window": Job(2, FSDP, {"accumulate_grad_batches": 2}, APART),
    "fsdp, bf16": Job(2, FSDP, {"precision": "bf16-mixed"}),
    "fsdp, kept": Job(2, partial(FSDP, reshard_after_forward=False)),
    "fsdp, selective checkpointing": Job(2, FSDP, {"activation_checkpointing": "selective"}),
    "tp": Job(2, TP),
    "tp, bf16, clipped": Job(2, TP, {"precision": "bf16-mixed", **CLIPPED}),
    "tp, sequence": Job(2, partial(TP, sequence_parallel=True), net=transformer, data=sentences),
    "pp": Job(2, PIPELINE),
    "pp of 4 parts, clipped": Job(2, partial(PIPELINE, num_microbatches=4), CLIPPED),
    "gpipe": Job(2, partial(PIPELINE, schedule="gpipe", num_microbatches=4), {}, sgd),
    **{name: Job(2, partial(PIPELINE, schedule=name, num_microbatches=4)) for name in TWO_STAGES},
    "four hybrid": Job(4, partial(FSDP, dp_replicate=2, dp_shard=2)),
    "four hybrid, clipped, window": Job(4, partial(FSDP, dp_replicate=2), {"accumulate_grad_batches": 2, **CLIPPED}),
    "four fsdp": Job(4, FSDP, CLIPPED),
    "four ddp": Job(4, DDP, CLIPPED),
    "four tp x fsdp": Job(4, TP),
    "four tp x ddp": Job(4, partial(TP, dp_replicate=2, dp_shard=1)),
    "four pp x fsdp": Job(4, PIPELINE),
    "four pp x ddp": Job(4, partial(PIPELINE, dp_replicate=2, dp_shard=1)),
    "four pp x tp": Job(4, partial(PIPELINE, tp=2)),
    "four pp x tp, llama": Job(4, CUT, CLIPPED, **LLAMA),
    "four pp x tp, llama, interleaved": Job(4, partial(CUT, schedule="interleaved", num_microbatches=4), **LLAMA),
    "four pp x tp, llama, a norm ends a stage": Job(4, partial(CUT, split=["head"]), **LLAMA),
    "four stages": Job(4, partial(MeshParallel, pp=4)),
    "ddp, without logits": Job(2, DDP, **WITHOUT_LOGITS),
    "fsdp, without logits, bf16": Job(2, FSDP, BF16, **WITHOUT_LOGITS),
    "tp, without logits": Job(2, TP, CLIPPED, **WITHOUT_LOGITS),
    "ddp, muon": Job(2, DDP, optimizer=muon),
    "ddp, muon, divided": Job(2, DDP, optimizer=partial(muon, divides_work=True)),
    "fsdp, muon": Job(2, FSDP, CLIPPED, optimizer=muon),
    "tp, muon": Job(2, TP, optimizer=muon),
    "four hybrid, muon": Job(4, partial(FSDP, dp_replicate=2), optimizer=muon),
    "four tp x fsdp, muon": Job(4, TP, optimizer=muon),
    **(of_deepspeed() if parity().STAGES else {}),
}
"""By name; the rows of ``tests/parity/test_strategies.py`` have their names there."""
