"""Pipelines whose stages hand parts of tensors to each other: with tensor parallel along the sequence and the vocabulary, as one process."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from engine import Callback, Fit, Loss, MeshParallel, TrainModule

VOCABULARY, WIDTH, TOKENS, ROWS, STEPS, CLIP = 12, 8, 6, 7, 3, 0.5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(TrainModule):
    """Tokens to logits. Between the norms and the layers after them, and after the head, there are ``DTensor``s."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def parallelize(self, mesh: Any) -> dict[str, Any] | None:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.norm, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.pipeline_stages():
            x = part(x)
        return x

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Any = self(batch[:, :-1])
        return out.full_tensor() if hasattr(out, "full_tensor") else out

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Weighted(Net):
    """A loss over the tokens that are not 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return Loss(*self.sums(batch))

    def sums(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        wanted = batch[:, 1:].flatten()
        kept = wanted.ne(0)
        wanted = wanted.masked_fill(~kept, -100)
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), wanted, reduction="sum"), kept.sum()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator) for _ in range(STEPS)]


CUT = {"pp": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True}
CASES: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "1f1b": (Net, {}, {}),
    "parts that do not divide": (Net, {"num_microbatches": 3}, {}),
    "a stage of the embedding": (Net, {"split": ["layers.0"]}, {}),
    "a stage after a norm": (Net, {"split": ["head"]}, {}),
    "interleaved": (Net, {"schedule": "interleaved", "num_microbatches": 4}, {}),
    "zero bubble": (Net, {"schedule": "zero_bubble", "num_microbatches": 4}, {}),
    "checkpointing": (Net, {"num_microbatches": 4}, {"activation_checkpointing": "full"}),
    "weighted": (Weighted, {"num_microbatches": 3}, {}),
}


class Watch(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []
        self.weights: dict[str, Any] = {}

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norms.append(run.engine.grad_norm.item())

    def on_train_end(self, run: Any, module: Any) -> None:
        state = run.engine.strategy.model_state(module)
        self.weights = {name: value.flatten().tolist() for name, value in state.items()}


def train(make: type[Net], strategy: Any, more: dict[str, Any]) -> dict[str, Any]:
    watch, module = Watch(), make()
    fit = Fit(
        accelerator="cpu", strategy=strategy, callbacks=watch, gradient_clip_val=CLIP, log_every_n_steps=0, seed=1, num_sanity_val_steps=0,
        **more,
    )  # fmt: skip
    fit.run(module, batches())
    val = fit.validate(module, batches())[0]["val"]
    predicted = torch.cat(list(fit.predict(module, batches())))
    return {"norms": watch.norms, "weights": watch.weights, "val": val, "predicted": predicted.flatten().tolist()}


FAST = ("1f1b", "a stage after a norm", "weighted")
"""The others are slow."""


def four_trained() -> Any:
    chosen = {name: CASES[name] for name in json.loads(os.environ["CASES"])}
    return {name: train(make, MeshParallel(**CUT, **axes), more) for name, (make, axes, more) in chosen.items()}


@cache
def bare(make: type[Net]) -> dict[str, Any]:
    """A loop in plain PyTorch."""
    model = make()
    optimizer, norms = model.configure_optimizers(), []
    for batch in batches():
        if isinstance(model, Weighted):
            total, count = model.sums(batch)
            loss = total / count
        else:
            loss = model.loss(batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        val = sum(model.loss(batch).item() for batch in batches()) / STEPS
        predicted = torch.cat([model(batch[:, :-1]) for batch in batches()])
    weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    return {"norms": norms, "weights": weights, "val": val, "predicted": predicted.flatten().tolist()}


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Any:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return ranks_of_file(__file__, 4, "four_", CASES=json.dumps([item.callspec.params["name"] for item in items]))[
        "trained"
    ]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_parts_of_tensors_between_stages_train_as_one_process(four: Any, name: str) -> None:
    expected = bare(CASES[name][0])
    for rank, found in enumerate(four):
        torch.testing.assert_close(found[name]["norms"], expected["norms"], **CLOSE)
        torch.testing.assert_close(found[name]["val"], expected["val"], **CLOSE)
        torch.testing.assert_close(found[name]["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)
        assert bool(found[name]["weights"]) is (rank == 0)
    weights = four[0][name]["weights"]
    assert weights.keys() == expected["weights"].keys()
    for key, values in expected["weights"].items():
        torch.testing.assert_close(weights[key], values, rtol=1e-4, atol=1e-5)
