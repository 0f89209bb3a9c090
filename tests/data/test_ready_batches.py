"""Batches that the dataset itself gives (``DataLoader(batch_size=None)``) weigh their samples; gathered outputs are in the data's order.

Expected weights come from a bare loop in float64, expected orders from the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from engine import CombinedLoader, DataModule, Engine, Fit, Loss, TrainModule
from engine.utils.sample_count import counted

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


# -- how many samples a batch has ---------------------------------------------------------------------------------------------------------


class Own:
    """A batch of a class of the user's."""

    def __init__(self, values: Any) -> None:
        self.v = torch.tensor([float(value) for value in values], dtype=torch.float64)


class Hidden:
    """A batch of a class of the user's whose attributes show nothing."""

    def __init__(self, values: Any) -> None:
        self.values = tuple(values)

    @property
    def v(self) -> Tensor:
        return Own(self.values).v


def edges(values: list[int]) -> Any:
    return {"edges": torch.zeros(2, 9), "v": Own(values).v}


def time_first(values: list[int]) -> Any:
    return torch.stack([Own(values).v] * 5)


def constant_first(values: list[int]) -> Any:
    return {"scale": torch.ones(1), "v": Own(values).v}


def readable(values: list[int]) -> list[int]:
    """Leaves out what cannot be read: 0, 5, 10, ..."""
    return [value for value in values if value % 5]


def readable_pairs(values: list[int]) -> Any:
    kept = readable(values)
    return [Own(kept).v, torch.zeros(len(kept), 3)]


def readable_objects(values: list[int]) -> Any:
    return Own(readable(values))


def readable_lists(values: list[int]) -> Any:
    kept = readable(values)
    return tuple(torch.full((4, 2), float(value)) for value in kept), tuple({"v": float(value)} for value in kept)


class Squares(TrainModule):
    """The gradient of its weight, which starts at 0 and steps by -1, is the mean over the samples i of i * i."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch is None:
            return None
        squares = self.squares(batch)
        self.log("mean", squares.mean(), on_step=False, on_epoch=True)
        return (self.w * squares).mean() if len(squares) else self.w * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.squares(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.squares(batch)

    def squares(self, batch: Any) -> Tensor:
        if isinstance(batch, tuple):
            return Own([target["v"] for target in batch[1]]).v.square()
        if isinstance(batch, Tensor):
            return (batch[0] if batch.ndim == 2 else batch).double().square()
        values: Tensor = batch[0] if isinstance(batch, list) else batch["v"] if isinstance(batch, dict) else batch.v
        return values.square()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Says(Squares):
    def count_samples(self, batch: Any) -> int:
        return len(self.squares(batch))


class SaysData(DataModule):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader

    def count_samples(self, batch: Any) -> int:
        return len(Squares().squares(batch))


class Flow(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Parts(IterableDataset[Any]):
    """Ready batches of 0 to 6."""

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn

    def __iter__(self) -> Iterator[Any]:
        return iter(parts(self.collate_fn))


class SayingParts(Parts):
    def count_samples(self, batch: Any) -> int:
        return len(Squares().squares(batch))


class Listed(list[Any]):
    def count_samples(self, batch: Any) -> int:
        return len(Squares().squares(batch))


def parts(collate_fn: Any) -> list[Any]:
    return [collate_fn(values) for values in ([0, 1], [2, 3], [4, 5], [6])]


COLLATES = {"an object": Own, "edges": edges, "time first": time_first, "a constant": constant_first}


def streamed(collate_fn: Any, **options: Any) -> Any:
    return DataLoader(Flow(7), batch_size=2, collate_fn=collate_fn, **options)


def trained(module: Squares, data: Any, window: int, ranks: int = 1) -> list[float]:
    """The gradient of one step, and the mean over the epoch."""
    options: dict[str, Any] = {"datamodule" if isinstance(data, DataModule) else "train_loader": data}
    fit = Fit(accelerator="cpu", max_epochs=1, accumulate_grad_batches=window // ranks, seed=1, log_every_n_steps=0)
    result = fit.run(module, **options)
    assert result.step == 1
    return [-module.w.item(), result.metrics["mean"]]


def counted_on(ranks: int) -> dict[str, list[float]]:
    found = {f"stream, {name}": trained(Squares(), streamed(collate), 4, ranks) for name, collate in COLLATES.items()}
    for name, collate in COLLATES.items():
        found[f"hook, {name}"] = trained(Says(), parts(collate), 4, ranks)
    found["workers"] = trained(Squares(), streamed(Own, num_workers=1), 4, ranks)
    found["data module"] = trained(Squares(), SaysData(parts(edges)), 4, ranks)
    found["dataset"] = trained(Squares(), DataLoader(SayingParts(edges), batch_size=None), 4, ranks)
    found["list"] = trained(Squares(), Listed(parts(edges)), 4, ranks)
    found["map-style, hook"] = trained(Says(), DataLoader(range(7), batch_size=2, collate_fn=edges), 4, ranks)
    both = CombinedLoader({"v": streamed(Own)}) if ranks == 1 else None
    found["member"] = trained(Member(), both, 4, ranks) if both is not None else [13.0, 13.0]
    return found


class Member(Squares):
    def squares(self, batch: Any) -> Tensor:
        return super().squares(batch["v"])


def left_out_on(ranks: int) -> dict[str, list[float]]:
    """The samples 1 to 11 without 5 and 10, asked for in four batches of 3, in two of 6, and in one of 12."""
    found = {}
    for batch in (3, 6, 12) if ranks == 1 else (3, 6):
        for collate in (readable_pairs, readable_lists, readable_objects):
            data: Any = DataLoader(range(12), batch_size=batch, collate_fn=collate)
            found[f"{collate.__name__}, {batch}"] = trained(Squares(), data, 12 // batch, ranks)
            data = DataLoader(
                range(12), batch_sampler=[list(range(i, i + batch)) for i in range(0, 12, batch)], collate_fn=collate
            )
            found[f"{collate.__name__}, {batch}, batch sampler"] = trained(Squares(), data, 12 // batch, ranks)
            found[f"{collate.__name__}, {batch}, stream"] = trained(
                Squares(), DataLoader(Flow(12), batch_size=batch, collate_fn=collate), 12 // batch, ranks
            )
    return found


def none_if_empty(batch: Any) -> Any:
    return batch if len(batch) else None


def empty_on(ranks: int) -> dict[str, Any]:
    """Samples 1 and 3 with batches without samples between them."""

    def collate(values: list[int]) -> Any:
        return Own([value for value in values if value % 2]).v

    batches = [collate([1]), collate([2]), collate([3]), collate([4])]
    data = {
        "list": batches,
        "stream": DataLoader(Flow(4), batch_size=1, collate_fn=collate),
        "map-style": DataLoader(range(4), batch_size=1, collate_fn=collate),
        "list with None": [none_if_empty(batch) for batch in batches],
        "stream with None": DataLoader(Flow(4), batch_size=1, collate_fn=lambda values: none_if_empty(collate(values))),
        "map-style with None": DataLoader(
            range(4), batch_size=1, collate_fn=lambda values: none_if_empty(collate(values))
        ),
    }
    found = {name: trained(Squares(), loader, 4, ranks) for name, loader in data.items()}
    fit = Fit(accelerator="cpu", seed=1)
    found["val"] = fit.validate(Squares(), data["map-style"])[0]["val"]
    found["predicted"] = [len(output) for output in fit.predict(Squares(), data["map-style"])]
    found["predicted from a list"] = [len(output) for output in fit.predict(Squares(), batches)]
    return found


def two_counts() -> dict[str, Any]:
    return {"counted": counted_on(2), "left out": left_out_on(2), "empty": empty_on(2)}


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


KEPT = [value * value for value in range(12) if value % 5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_are_counted_where_they_can_be(ranks: int, request: Any) -> None:
    found = counted_on(1) if ranks == 1 else request.getfixturevalue("two")["counts"][0]["counted"]
    assert found == {name: pytest.approx([13.0, 13.0]) for name in found}


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_that_a_collate_function_leaves_out_do_not_weigh(ranks: int, request: Any) -> None:
    found = left_out_on(1) if ranks == 1 else request.getfixturevalue("two")["counts"][1]["left out"]
    mean = sum(KEPT) / len(KEPT)
    assert found == {name: pytest.approx([mean, mean]) for name in found}


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_samples_stay_zero(ranks: int, request: Any) -> None:
    found = empty_on(1) if ranks == 1 else request.getfixturevalue("two")["counts"][0]["empty"]
    for name in ("list", "stream", "map-style", "list with None", "stream with None", "map-style with None"):
        assert found[name] == [5.0, 5.0], name
    assert found["val"] == 5.0
    assert found["predicted"] == [0, 1, 0, 1]
    assert found["predicted from a list"] == [1, 0, 1, 0]


GUESSES = {
    "an object": lambda: parts(Own),
    "edges": lambda: parts(edges),
    "a constant": lambda: parts(constant_first),
    "a generator": lambda: iter(parts(edges)),
    "time first": lambda: [torch.ones(length, 2, 1) for length in (3, 5, 4, 2)],
    "time first, of numbers": lambda: iter([torch.ones(length, 2, dtype=torch.int64) for length in (3, 5, 4, 2)]),
    "an object that shows nothing, of which some were left out": lambda: DataLoader(
        range(24), batch_size=6, collate_fn=lambda values: Hidden(readable(values))
    ),
    "edges of which some were left out": lambda: DataLoader(
        range(24), batch_size=6, collate_fn=lambda values: edges(readable(values))
    ),
}


@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_that_decides_a_weight_warns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)
    with pytest.warns(UserWarning, match=r"how many samples a batch has is guessed: .*count_samples") as caught:
        trained(Squares(), GUESSES[name](), 4)
    assert len([warning for warning in caught if "guessed" in str(warning.message)]) == 1


class Silent(Squares):
    """Logs nothing for the epoch."""

    def log(self, *arguments: Any, **options: Any) -> None: ...  # type: ignore[override]


class Counting(Silent):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        squares = self.squares(batch)
        return Loss((self.w * squares).sum(), len(squares))


def test_attributes_of_an_object_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)
    with pytest.warns(UserWarning, match="only attributes of an object show it"):
        assert trained(Squares(), parts(Own), 4) == pytest.approx([13.0, 13.0])


def test_one_tensor_with_the_samples_first_is_no_guess() -> None:
    rows = [torch.ones(size, 2) for size in (4, 3, 2, 1)]
    windows = [torch.ones(size, 5, 3) for size in (4, 4, 4, 1)]
    texts = [torch.ones(4, length, dtype=torch.int64) for length in (3, 5, 4, 2)]
    for batches in (rows, windows, texts, iter(windows)):
        trained(Squares(), batches, 4)


def test_no_warning_where_no_guess_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)
    engine = Fit(accelerator="cpu", max_epochs=1, accumulate_grad_batches=4, seed=1)
    engine.run(Counting(), parts(edges))
    Fit(accelerator="cpu", max_epochs=1, seed=1).run(Silent(), parts(edges))
    with pytest.warns(UserWarning, match="guessed"):
        Fit(accelerator="cpu", max_epochs=1, seed=1).run(Squares(), parts(edges))


@pytest.mark.parametrize(("number", "error"), [(2.5, TypeError), (None, TypeError), (-1, ValueError)])
def test_what_is_said_is_a_number_of_samples(number: Any, error: type[Exception]) -> None:
    module = Says()
    module.count_samples = lambda batch: number  # type: ignore[method-assign, misc]
    data = DataLoader(range(4), batch_size=2)
    data.count_samples = module.count_samples  # type: ignore[attr-defined]
    with pytest.raises(error, match=r"count_samples\(batch\) (must return|returned)"):
        trained(Squares(), data, 2)


def test_a_collate_function_that_says_so_keeps_its_samples() -> None:
    def halves(values: list[int]) -> Tensor:
        return torch.tensor(values).view(2, -1)[0]  # each pair of samples is one row

    def sizes() -> list[int]:
        engine = Engine(accelerator="cpu", accumulate_grad_batches=2)
        loader = engine.prepare(DataLoader(range(12), batch_size=4, collate_fn=halves))
        return [engine.window.share.size for _ in loader]

    assert sizes() == [2, 2, 2]
    halves.keeps_samples = True  # type: ignore[attr-defined]
    assert sizes() == [4, 4, 4]


SHOWN = {
    "pairs": ((torch.zeros(5, 3), torch.zeros(5)), None, 5),
    "edges, asked": (edges([1, 2, 3]), 3, 3),
    "time first, asked": (torch.zeros(9, 4), 4, 4),
    "images and targets": ((tuple([torch.zeros(3, 4, 4)] * 3), tuple([{"b": torch.zeros(2, 4)}] * 3)), 4, 3),
    "lists": (([torch.zeros(3, 4, 4)] * 3, [{"b": torch.zeros(2, 4)}] * 3), 4, 3),
    "samples, not collated": ([{"x": torch.zeros(8)}] * 3, 4, 3),
    "samples of tuples": ([(torch.zeros(8), 1)] * 3, 4, 3),
    "two dicts": (({"i": torch.zeros(5, 2)}, {"t": torch.zeros(5)}), None, 5),
    "all left out": (None, 4, 0),
    "an empty list": ([], None, 0),
    "an empty tensor": (torch.zeros(0, 3), None, 0),
    "texts": (["a", "b"], None, 2),
    "texts and labels": ({"t": ["a"] * 5, "y": torch.zeros(5)}, None, 5),
    "arrays": ({"x": torch.zeros(4, 2).numpy()}, None, 4),
    "a scalar": (torch.zeros(()), None, 1),
    "a number": (3, None, 1),
    "more rows than asked": (torch.zeros(40, 2), 8, 8),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_batch_shows(name: str) -> None:
    batch, asked, samples = SHOWN[name]
    assert counted(batch, asked) == (samples, "")
