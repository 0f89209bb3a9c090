"""Batches that the dataset itself gives (``DataLoader(batch_size=None)``) weigh their samples; gathered outputs are in the data's order.

Expected weights come from a bare loop in float64, expected orders from the data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from engine import CombinedLoader, Engine, Fit, TrainModule

SIZES = (5, 1, 3, 2, 4)
X = torch.tensor(
    [0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 3.0, 1.0, -2.0, 0.125, 0.375, 2.5, -0.5, 1.25, 0.75], dtype=torch.float64
)
LR = 0.125


class Ready(Dataset[Tensor]):
    """Its items are batches of 5, 1, 3, 2 and 4 samples."""

    def __init__(self) -> None:
        self.batches = X.split(list(SIZES))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


class Bulk(Dataset[Tensor]):
    """It takes a list of indices at once."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, indices: list[int]) -> Tensor:
        return X[indices]


class Mean(TrainModule):
    """Squared distance from a weight that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = torch.cat(list(batch.values())) if isinstance(batch, dict) else batch
        loss = (self.w - batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def loader(data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Ready() if data is None else data, batch_size=None, **options)


def expected(batches: int, sizes: tuple[int, ...] = SIZES) -> float:
    """One step for every so many batches, on the mean over their samples."""
    w, parts = torch.zeros((), dtype=torch.float64), X.split(list(sizes))
    for low in range(0, len(parts), batches):
        w = w - LR * 2 * (w - torch.cat(parts[low : low + batches])).mean()
    return w.item()


def found(window: int, world: int = 1) -> dict[str, float]:
    module = Mean()
    fit = Fit(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=window,
        num_sanity_val_steps=0,
        seed=1,
        log_every_n_steps=0,
    )
    result = fit.run(module, loader(num_workers=1 if world > 1 else 0), loader())
    bulk = Mean()
    fit.run(bulk, loader(Bulk(), sampler=BatchSampler(SequentialSampler(X), 4, drop_last=False)))
    pair = Mean()
    fit.run(
        pair,
        CombinedLoader(
            {
                "a": loader(),
                "b": DataLoader(TensorDataset(X[:5]), batch_size=1, collate_fn=lambda rows: rows[0][0].reshape(1)),
            }
        ),
    )
    return {
        "w": module.w.item(),
        "mean": result.metrics["mean"],
        "bulk": bulk.w.item(),
        "pair": pair.w.item(),
        "loss": result.metrics["loss_epoch"],
    }


def two_windows() -> Any:
    return [found(window, 2) for window in (1, 2)]


def in_order() -> Any:
    """What ranks have gathered from data of uneven sizes, in windows of 1 to 4."""
    gathered = []
    for samples in (1, 7, 19, 24):
        for window in (1, 3, 4):
            engine = Engine(accelerator="cpu", accumulate_grad_batches=window)
            for data in (
                DataLoader(torch.arange(samples), batch_size=2),
                list(torch.arange(samples).split(2)),
                Numbers(samples),
            ):  # type: ignore[arg-type]
                own: list[int] = []
                for batch in engine.prepare_data_loader(data):
                    own += engine.gather_for_metrics(batch).tolist()
                gathered.append(own == list(range(samples)))
    return gathered


class Numbers:
    """Batches of 2 without indices."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(torch.arange(self.samples).split(2))


two_in_order = three_in_order = in_order


def three_windows() -> Any:
    return [found(1, 3)]


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_")


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 3, "three_")


def check(values: dict[str, float], batches: int) -> None:
    assert values["w"] == pytest.approx(expected(batches), rel=1e-6)
    assert values["mean"] == pytest.approx(X.mean().item(), rel=1e-6)
    assert values["bulk"] == pytest.approx(expected(batches, (4, 4, 4, 3)), rel=1e-6)
    pairs, w = [torch.cat([part, X[i : i + 1]]) for i, part in enumerate(X.split(list(SIZES)))], 0.0
    for low in range(0, 5, batches):
        w = w - LR * 2 * (w - torch.cat(pairs[low : low + batches])).mean().item()
    assert values["pair"] == pytest.approx(w, rel=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_ready_batches_weigh_their_samples(window: int) -> None:
    check(found(window), window)


def test_ready_batches_weigh_their_samples_on_two_ranks(two: Any) -> None:
    for rank in two["windows"]:
        check(rank[0], 2)
        check(rank[1], 4)


@pytest.mark.slow
def test_ready_batches_weigh_their_samples_on_three_ranks(three: Any) -> None:
    for rank in three["windows"]:
        check(rank[0], 3)


def test_what_is_gathered_is_in_the_datas_order(two: Any) -> None:
    assert in_order() == [True] * 36
    assert two["in_order"] == [[True] * 36] * 2


@pytest.mark.slow
def test_what_is_gathered_from_three_ranks_is_in_the_datas_order(three: Any) -> None:
    assert three["in_order"] == [[True] * 36] * 3
