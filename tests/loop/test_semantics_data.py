"""What other trainers get wrong about windows, weights and data. Expected numbers come from hand computations and bare PyTorch loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from engine import Engine, Fit, Loss, TrainModule


def fit(module: TrainModule, loader: Any, val: Any = None, **settings: Any) -> Any:
    return Fit(**{"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, "seed": 1, **settings}).run(
        module, loader, val
    )


# -- the window of 6 micro-batches by 4 -------------------------------------------------------------------------------------------


class Unit(TrainModule):
    """One weight at 0, SGD with lr 1: each micro-batch of ones has gradient 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.applied: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.w.grad is not None
        self.applied.append(self.w.grad.item())


def test_six_unit_micro_batches_by_four() -> None:
    module = Unit()
    result = fit(module, [torch.ones(2, 1) for _ in range(6)], accumulate_grad_batches=4)
    assert module.applied == [1.0, 1.0]
    assert (result.step, module.w.item()) == (2, -2.0)


# -- Loss(sum, count) -------------------------------------------------------------------------------------------------------------

COUNTS = (3, 17, 1, 40)
START = torch.tensor([0.25, -0.5, 1.0])


def tokens() -> list[tuple[Tensor, Tensor]]:
    """Four micro-batches with 3, 17, 1 and 40 targets."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, generator=generator)) for n in COUNTS]


class Tokens(TrainModule):
    """Squared errors of a linear model, elementwise so that autocast leaves it in fp32: what is left of fp16 is the loss scale."""

    def __init__(self, as_tensor: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(START.clone())
        self.as_tensor = as_tensor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return Loss(((x * self.w).sum(-1) - y).square().sum(), torch.tensor(len(y)) if self.as_tensor else len(y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def one_batch(clip: float | None) -> Tensor:
    """The gradient over all 61 targets as one batch, in plain PyTorch."""
    w = START.clone().requires_grad_()
    x, y = (torch.cat(part) for part in zip(*tokens(), strict=True))
    ((x * w).sum(-1) - y).square().mean().backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(w, clip)
    assert w.grad is not None
    return w.grad


def by_fit(world_size: int, **settings: Any) -> list[float]:
    module = Tokens(as_tensor=settings.pop("as_tensor", False))
    result = fit(module, tokens(), accumulate_grad_batches=-(-4 // world_size), **settings)
    assert result.step == 1
    return (START - module.w.detach()).tolist()


def by_engine(world_size: int, clip: float | None = None, **settings: Any) -> list[float]:
    engine = Engine(accelerator="cpu", accumulate_grad_batches=-(-4 // world_size), **settings)
    module = Tokens()
    model, optimizer = engine.prepare(Step(module), torch.optim.SGD(module.parameters(), lr=1.0))
    for batch in engine.prepare_data_loader(tokens()):
        with engine.accumulate(model):
            engine.backward(model(batch))
            if clip is not None:
                engine.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return (START - module.w.detach()).tolist()


class Step(nn.Module):
    def __init__(self, module: Tokens) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


def weighted(world_size: int) -> dict[str, list[float]]:
    """The applied gradients; on two ranks one has 4 targets, the other 57."""
    return {
        "fit": by_fit(world_size),
        "fit tensor": by_fit(world_size, as_tensor=True),
        "fit tensor clip": by_fit(world_size, as_tensor=True, gradient_clip_val=0.5),
        "fit clip": by_fit(world_size, gradient_clip_val=0.5),
        "fit fp16": by_fit(world_size, precision="16-mixed"),
        "fit fp16 clip": by_fit(world_size, precision="16-mixed", gradient_clip_val=0.5),
        "engine": by_engine(world_size),
        "engine clip": by_engine(world_size, clip=0.5),
        "engine fp16": by_engine(world_size, precision="16-mixed"),
        "engine fp16 clip": by_engine(world_size, clip=0.5, precision="16-mixed"),
    }


# -- 19 samples -------------------------------------------------------------------------------------------------------------------


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """19 numbered samples of a linear regression."""

    def __init__(self, count: int = 19) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(count, 3, generator=generator), torch.randn(count, generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Regression(TrainModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.w = nn.Parameter(START.clone())
        self.seen: list[list[int]] = []
        self.validated: list[int] = []

    def errors(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return ((x * self.w).sum(-1) - y).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[2].tolist())
        return self.errors(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch[2].tolist()
        self.log("error", self.errors(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def big_batch(world_size: int, drop_last: bool) -> list[float]:
    """Two epochs over global batches of 4 * 2 * world_size samples in order, the last one short, in plain PyTorch."""
    data, w = Samples(), START.clone().requires_grad_()
    used = {1: 16, 2: 16, 3: 12}[world_size] if drop_last else 19
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for _ in range(2):
        for low in range(0, used, 8 * world_size):
            part = slice(low, min(low + 8 * world_size, used))
            optimizer.zero_grad()
            ((data.x[part] * w).sum(-1) - data.y[part]).square().mean().backward()
            optimizer.step()
    return w.tolist()


def nineteen() -> dict[str, Any]:
    found = {}
    for drop_last in (False, True):
        module = Regression()
        result = fit(
            module, DataLoader(Samples(), batch_size=4, drop_last=drop_last), max_epochs=2, accumulate_grad_batches=2
        )
        found["drop" if drop_last else "keep"] = {"w": module.w.tolist(), "seen": module.seen, "steps": result.step}
    module = Regression()
    fit(module, DataLoader(Samples(), batch_size=4, shuffle=True), max_epochs=2, accumulate_grad_batches=2)
    return {**found, "shuffled": {"seen": module.seen}}


# -- order, validation, metrics ---------------------------------------------------------------------------------------------------


def distributed_sampler() -> list[list[int]]:
    engine, data, module = Engine(accelerator="cpu"), Samples(8), Regression()
    sampler = DistributedSampler(data, num_replicas=engine.num_processes, rank=engine.process_index, shuffle=False)
    fit(module, DataLoader(data, batch_size=2, sampler=sampler))
    return module.seen


def validation(samples: int = 7) -> dict[str, Any]:
    module = Regression(lr=0.0)
    result = fit(module, DataLoader(Samples(4), batch_size=1), DataLoader(Samples(samples), batch_size=2))
    (again,) = Fit(accelerator="cpu").validate(module, DataLoader(Samples(samples), batch_size=2))
    half = len(module.validated) // 2
    return {
        "error": [result.metrics.get("error"), again["error"]],
        "seen": [module.validated[:half], module.validated[half:]],
    }


def validation_metric() -> float:
    data = Samples(7)
    return ((data.x * START).sum(-1) - data.y).square().mean().item()


class Logged(Unit):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


UNEVEN = [
    torch.full((size, 1), value) for size, value in ((1, 8.0), (3, 1.0), (2, 2.0), (5, 4.0))
]  # (8 + 3 + 4 + 20) / 11


def logged_mean() -> float:
    result: float = fit(Logged(), UNEVEN).metrics["mean"]
    return result


# -- iterable data ----------------------------------------------------------------------------------------------------------------


class Uneven(IterableDataset[Tensor]):
    """Divided by the user: rank 0 has five batches, others two; sample values are 1, 2, 3, ..."""

    presharded = True

    def __init__(self, rank: int) -> None:
        self.count = 2 if rank else 5

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2, 1), float(i + 1)) for i in range(self.count)])


def runs_out() -> list[Any]:
    found: list[Any] = []
    for window in (1, 2):
        module = Unit()
        rank = Engine(accelerator="cpu").process_index
        loader = DataLoader(Uneven(rank), batch_size=None)
        result = fit(module, loader, max_epochs=2, accumulate_grad_batches=window)
        found.append([result.status, result.epoch, result.step, module.applied])
    return found


def generator_twice() -> list[Any]:
    module = Unit()
    try:
        fit(module, (torch.ones(2, 1) for _ in range(4)), max_epochs=2)
    except ValueError as error:
        return [len(module.applied), str(error)]
    return [len(module.applied), ""]


def stream_shared() -> list[float]:
    """A generator that no one divided: the ranks take turns, so a step's gradient is the mean of world_size batches."""
    module = Unit()
    fit(module, (torch.full((1, 1), float(i)) for i in range(7)))
    return module.applied


def batches_listed() -> list[float]:
    module = Unit()
    fit(module, [torch.full((2, 1), float(i)) for i in (1, 2, 3, 4)])
    return module.applied


# -- what runs on each rank -------------------------------------------------------------------------------------------------------


def rank_weighted() -> Any:
    return weighted(Engine(accelerator="cpu").num_processes)


rank_nineteen = nineteen


def two_distributed_sampler() -> Any:
    return distributed_sampler()


two_weighted = rank_weighted
two_nineteen = nineteen
two_validation = validation


def two_one_sample() -> Any:
    return validation(1)


two_mean = logged_mean
two_runs_out = runs_out
two_generator = generator_twice
two_stream = stream_shared
two_list = batches_listed


@pytest.fixture(scope="module")
def one() -> dict[str, list[Any]]:
    functions = {
        "weighted": rank_weighted,
        "nineteen": nineteen,
        "validation": validation,
        "mean": logged_mean,
        "generator": generator_twice,
    }
    functions |= {"stream": stream_shared, "list": batches_listed}
    return {name: [function()] for name, function in functions.items()}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_")


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 3, "rank_")


@pytest.fixture(params=["one", "two", pytest.param("three", marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["one", "two"])
def small_world(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", ["fit", "fit tensor", "fit fp16", "engine", "engine fp16"])
def test_weighted_losses_are_one_batch(world: Any, name: str, clip: bool) -> None:
    expected = one_batch(0.5 if clip else None)
    for rank in world["weighted"]:
        torch.testing.assert_close(torch.tensor(rank[f"{name} clip" if clip else name]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["keep", "drop"])
def test_nineteen_samples_train_as_big_batches(world: Any, kind: str) -> None:
    ranks = world["nineteen"]
    expected = torch.tensor(big_batch(len(ranks), kind == "drop"))
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank[kind]["w"]), expected, rtol=1e-6, atol=1e-6)
    steps = {"keep": {1: 6, 2: 4, 3: 2}, "drop": {1: 4, 2: 2, 3: 2}}[kind][len(ranks)]
    assert {rank[kind]["steps"] for rank in ranks} == {steps}


@pytest.mark.parametrize(
    ("kind", "counts"), [("keep", (19, 19, 19)), ("drop", (16, 16, 12)), ("shuffled", (19, 19, 19))]
)
def test_nothing_is_repeated_or_dropped(world: Any, kind: str, counts: tuple[int, ...]) -> None:
    ranks = [rank[kind]["seen"] for rank in world["nineteen"]]
    assert len({len(seen) for seen in ranks}) == 1
    half = len(ranks[0]) // 2
    for epoch in (slice(0, half), slice(half, None)):
        seen = [i for rank in ranks for batch in rank[epoch] for i in batch]
        assert len(seen) == len(set(seen)) == counts[len(ranks) - 1]
        if kind != "shuffled":
            assert sorted(seen) == list(range(len(seen)))


def test_shuffle_false_keeps_the_order(two: Any) -> None:
    first, second = (rank["keep"]["seen"][:3] for rank in two["nineteen"])
    assert first == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17]]
    assert second == [[4, 5, 6, 7], [12, 13, 14, 15], [18]]


def test_shuffled_epochs_differ(two: Any) -> None:
    seen = two["nineteen"][0]["shuffled"]["seen"]
    assert seen[:2] != seen[3:5]
    assert seen[0] != [0, 1, 2, 3]


def test_a_distributed_sampler_is_not_sharded_twice(two: Any) -> None:
    assert two["distributed_sampler"] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_seven_validation_samples(small_world: Any) -> None:
    ranks = small_world["validation"]
    for run in range(2):
        assert sorted(i for rank in ranks for i in rank["seen"][run]) == list(range(7))
        assert [rank["error"][run] for rank in ranks] == [pytest.approx(validation_metric(), rel=1e-6)] * len(ranks)


def test_a_rank_without_validation_samples_adds_nothing(two: Any) -> None:
    data = Samples(1)
    expected = ((data.x * START).sum(-1) - data.y).square().item()
    assert [rank["seen"] for rank in two["one_sample"]] == [[[0], [0]], [[], []]]
    assert [rank["error"] for rank in two["one_sample"]] == [[pytest.approx(expected, rel=1e-6)] * 2] * 2


def test_a_logged_mean_is_the_true_mean(small_world: Any) -> None:
    assert small_world["mean"] == [pytest.approx(35 / 11, rel=1e-7)] * len(small_world["mean"])


def test_data_that_runs_out_earlier_on_one_rank(two: Any) -> None:
    # Steps 1 and 2 on both ranks, 3 to 5 on rank 0 alone; in windows of two: (1, 2) on both, (3, 4), (5).
    expected = [["completed", 2, 10, [1.0, 2.0, 3.0, 4.0, 5.0] * 2], ["completed", 2, 6, [1.5, 3.5, 5.0] * 2]]
    assert two["runs_out"] == [expected] * 2


def test_a_generator_that_is_empty_in_the_second_epoch(small_world: Any) -> None:
    for steps, message in small_world["generator"]:
        assert steps == 4 // len(small_world["generator"])
        assert (
            "generator yielded no batch in epoch 1: it is empty, or a generator, which can be read only once" in message
        )


@pytest.mark.parametrize(
    ("ranks", "expected"), [("one", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), ("two", [0.5, 2.5, 4.5, 6.0])]
)
def test_a_stream_is_divided(request: pytest.FixtureRequest, ranks: str, expected: list[float]) -> None:
    found = request.getfixturevalue(ranks)["stream"]
    assert found == [expected] * len(found)


@pytest.mark.parametrize(("ranks", "expected"), [("one", [1.0, 2.0, 3.0, 4.0]), ("two", [1.5, 3.5])])
def test_a_list_of_batches_is_a_sequence_of_batches(
    request: pytest.FixtureRequest, ranks: str, expected: list[float]
) -> None:
    found = request.getfixturevalue(ranks)["list"]
    assert found == [expected] * len(found)
