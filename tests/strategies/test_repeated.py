"""A micro-batch that a rank repeats at weight 0 reaches nothing: weights and gradients of a stream under DDP are those of one plain float64 loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from engine import DDP, Engine, Fit, Loss, TrainModule

# Which of two branches each batch of one sample takes. With two ranks and one micro-batch a window the last of five is alone in its step,
# and the other rank repeats one of branch 1; with windows of two it shares its step with nobody either.
BRANCHES = (0, 1, 0, 1, 0)


class Branches(nn.Module):
    """Two linear layers of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.branches[int(batch["branch"][0])](batch["x"])
        return out


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, 1, 2, generator=generator, dtype=torch.float64)
    return [{"x": draw(), "branch": torch.tensor([branch])} for branch in BRANCHES]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def plain(per_step: int) -> list[float]:
    """The same in one process: steps over ``per_step`` samples, fewer at the end."""
    model = Branches()
    optimizer, data = adam(model), batches()
    for start in range(0, len(data), per_step):
        own = data[start : start + per_step]
        optimizer.zero_grad()
        torch.stack([model(batch).square().mean() for batch in own]).mean().backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> list[float]:
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]


class Module(TrainModule):
    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.net, self.counted = Branches(), counted

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square()
        return Loss(loss.sum(), len(loss)) if self.counted else loss.mean()

    def configure_optimizers(self) -> Any:
        return adam(self)


def loader() -> Any:
    return torch.utils.data.DataLoader(Stream(), batch_size=None)


def rank_fit() -> dict[str, list[float]]:
    found = {}
    for window in (1, 2):
        for counted in (False, True):
            module = Module(counted)
            Fit(
                strategy=DDP(find_unused_parameters=True), accelerator="cpu", precision="64-true", max_epochs=1, accumulate_grad_batches=window,
                log_every_n_steps=0, root_dir="unused",
            ).run(module, loader())  # fmt: skip
            found[f"{window} {counted}"] = flat(module)
    return found


def rank_engine() -> list[float]:
    """A loop without ``accumulate``."""
    engine = Engine(strategy=DDP(find_unused_parameters=True), accelerator="cpu", precision="64-true")
    module = Branches()
    model, optimizer, data = engine.prepare(module, adam(module), loader())
    for batch in data:
        engine.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return flat(module)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("counted", [False, True])
def test_fit(found: dict[str, list[Any]], window: int, counted: bool) -> None:
    for rank in found["fit"]:
        assert rank[f"{window} {counted}"] == pytest.approx(plain(2 * window), abs=1e-12)


def test_engine(found: dict[str, list[Any]]) -> None:
    for rank in found["engine"]:
        assert rank == pytest.approx(plain(2), abs=1e-12)
