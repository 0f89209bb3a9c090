"""A user's sampler decides what is trained on and in which order; only torch's own plain classes may be replaced.

Expected orders are what the samplers say when they are read in a bare loop, or written down by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from callbacks import ModelCheckpoint
from engine import Engine, Fit, TrainModule


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


class Numbers(Dataset[int]):
    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loaded(sampler: Any, batch_size: int = 4, count: int = 20, **options: Any) -> Any:
    return prepared(DataLoader(Numbers(count), batch_size=batch_size, sampler=sampler, **options))


def prepared(data: Any, **settings: Any) -> Any:
    return Engine(accelerator="cpu", seed=3, **settings).prepare_data_loader(data)


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: Any) -> list[int]:
    return [index for batch in read(loader) for index in batch]


# -- torch's own classes -----------------------------------------------------------------------------------------------------------


def test_a_sequential_sampler_over_part_of_the_data() -> None:
    assert flat(loaded(SequentialSampler(range(6)))) == [0, 1, 2, 3, 4, 5]
    inside = BatchSampler(SequentialSampler(range(6)), 4, drop_last=True)
    assert read(prepared(DataLoader(Numbers(), batch_sampler=inside))) == [[0, 1, 2, 3]]
    assert len(loaded(SequentialSampler(range(6)))) == 2


def test_a_random_sampler_over_part_of_the_data() -> None:
    found = flat(loaded(RandomSampler(range(6))))
    assert sorted(found) == list(range(6))


@pytest.mark.parametrize(("options", "count", "distinct"), [({"num_samples": 8}, 8, 8), ({"num_samples": 30}, 30, 20)])
def test_a_random_sampler_with_a_number_of_samples(options: dict[str, Any], count: int, distinct: int) -> None:
    found = flat(loaded(RandomSampler(Numbers(), **options)))
    assert (len(found), len(set(found))) == (count, distinct)


def test_a_random_sampler_with_replacement() -> None:
    loader = loaded(RandomSampler(Numbers(), replacement=True, num_samples=200))
    first, second = flat(loader), flat(loader)
    assert len(first) == len(second) == 200
    assert first != second
    assert set(first) <= set(range(20))


def test_a_list_of_indices_is_a_sampler() -> None:
    assert read(loaded([7, 3, 3, 19, 0])) == [[7, 3, 3, 19], [0]]
    assert flat(loaded((5, 1))) == [5, 1]


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))  # type: ignore[arg-type]


def test_subclasses_are_read_as_they_are() -> None:
    assert flat(loaded(Backwards(Numbers(6)), count=6)) == [5, 4, 3, 2, 1, 0]

    class Evens(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([0, 2, 4])

        def __len__(self) -> int:
            return 3

    assert flat(loaded(Evens(Numbers()))) == [0, 2, 4]


class Halves(DistributedSampler[int]):
    """The first half of the data, then the second, not every n-th."""

    def __iter__(self) -> Iterator[int]:
        part = len(self.dataset) // self.num_replicas  # type: ignore[arg-type]
        return iter(range(self.rank * part, self.rank * part + part))

    def __len__(self) -> int:
        return len(self.dataset) // self.num_replicas  # type: ignore[arg-type]


def test_a_part_for_other_processes_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"Halves yields shard 1 of 3, but this is rank 0 of 1 that see different data"
    ):
        loaded(Halves(Numbers(), 3, 1))
    with pytest.raises(ValueError, match=r"DistributedSampler yields shard 0 of 2"):
        loaded(DistributedSampler(Numbers(), 2, 0))
    assert flat(loaded(Halves(Numbers(6), 1, 0), count=6)) == [0, 1, 2, 3, 4, 5]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number % 20
            number += 1


def test_a_sampler_without_an_end_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.data.sampler_order._ENDLESS", 1000)
    loader = loaded(Endless())
    with pytest.raises(
        ValueError,
        match=r"Endless has no length, and yielded more than 1000 indices for 20 samples.*limit_train_batches",
    ):
        read(loader)
    loader = loaded(Endless())
    loader.limit = 7
    assert flat(loader) == [*range(20), *range(8)]


class Buckets(Sampler[list[int]]):
    """Batches of samples of about the same length: their sizes differ, and so do their number and order from epoch to epoch."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        own = random.Random(self.seed + self.epoch)
        left = list(range(20))
        while left:
            size = own.randint(1, 4)
            yield left[:size]
            left = left[size:]


@pytest.mark.parametrize("place", [1, 3, 5])
def test_batches_of_a_users_sampler_are_resumed(place: int) -> None:
    own = Buckets()
    own.set_epoch(2)
    expected = list(own)
    loader = prepared(DataLoader(Numbers(), batch_sampler=Buckets()))
    loader.set_epoch(2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(place)] == expected[:place]
    other = prepared(DataLoader(Numbers(), batch_sampler=Buckets()))
    other.load_state_dict(loader.state_dict())
    assert read(other) == expected[place:]


# -- samplers with a past ----------------------------------------------------------------------------------------------------------


class Turning(Sampler[int]):
    """Each pass begins one further; nobody tells it the epoch."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % 6 for index in range(6)])

    def __len__(self) -> int:
        return 6


class Told(Turning):
    """The same with a state, which a user's code may change."""

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


@pytest.mark.parametrize("kind", [Turning, Told])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_sampler_that_counts_its_passes_is_resumed(kind: type[Turning], place: int) -> None:
    first = loaded(kind(), batch_size=2)
    assert [flat(first) for _ in range(2)] == [[1, 2, 3, 4, 5, 0], [2, 3, 4, 5, 0, 1]]
    batches = iter(first)
    found = [index for _ in range(place) for index in next(batches).tolist()]
    state = first.state_dict()
    del batches
    other = loaded(kind(), batch_size=2)
    other.load_state_dict(state)
    assert found + flat(other) == [3, 4, 5, 0, 1, 2]
    again = other.state_dict()  # a resume of a resume
    assert flat(other) == [4, 5, 0, 1, 2, 3]
    third = loaded(kind(), batch_size=2)
    third.load_state_dict(again)
    assert flat(third) == [4, 5, 0, 1, 2, 3]


def test_a_state_that_was_changed_within_an_epoch_is_kept() -> None:
    sampler = Told()
    first = loaded(sampler, batch_size=2)
    batches = iter(first)
    next(batches)
    sampler.passes = 4  # what a callback may do
    state = first.state_dict()
    del batches
    sampler = Told()
    other = loaded(sampler, batch_size=2)
    other.load_state_dict(state)
    assert flat(other) == [3, 4, 5, 0]
    assert flat(other) == [5, 0, 1, 2, 3, 4]


def test_torchdatas_stateful_sampler_is_resumed_in_a_later_epoch() -> None:
    def make() -> Any:
        return loaded(StatefulDistributedSampler(Numbers(), 1, 0, seed=5), batch_size=8)

    first = make()
    orders = [flat(first) for _ in range(3)]
    assert sorted(orders[1]) == list(range(20))
    other = make()
    other.set_epoch(1)
    batches = iter(other)
    next(batches)
    state = other.state_dict()
    third = make()
    third.load_state_dict(state)
    assert flat(third) == orders[1][8:]
    assert flat(third) == orders[2]


def test_an_order_that_cannot_be_drawn_again_is_reported() -> None:
    class Unseeded(Turning):
        def __iter__(self) -> Iterator[int]:
            return iter(random.SystemRandom().sample(range(10**9), 6))

    first = loaded(Unseeded(), batch_size=2, count=10**9)
    batches = iter(first)
    next(batches)
    other = loaded(Unseeded(), batch_size=2, count=10**9)
    other.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="Unseeded yields another order after the resume than before in epoch 0"):
        read(other)


def test_a_run_is_resumed_with_a_sampler_that_counts(tmp_path: Any) -> None:
    class Seen(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))
            self.seen: list[int] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen += batch.tolist()
            return self.w.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(steps: int, resume: Any = None) -> list[int]:
        module, sampler = Seen(), Turning()
        fit = Fit(
            accelerator="cpu", max_steps=steps, max_epochs=9, root_dir=tmp_path, callbacks=[saver], log_every_n_steps=0
        )
        fit.run(module, DataLoader(Numbers(6), batch_size=2, sampler=sampler), resume=resume)
        return module.seen

    saver: Any = ModelCheckpoint(every="1 steps", keep_every="1 steps")
    whole = run(8)
    assert whole == [1, 2, 3, 4, 5, 0, 2, 3, 4, 5, 0, 1, 3, 4, 5, 0]
    for place in (4, 6):  # in the second epoch, and at its end
        checkpoint = next(tmp_path.glob(f"**/step={place:08}"))
        assert run(8, resume=checkpoint) == whole[2 * place :]


# -- two ranks ---------------------------------------------------------------------------------------------------------------------


def passes(loader: Any, number: int = 1) -> list[list[int]]:
    """The samples of each pass that count."""
    window = loader._window
    return [[i for batch in loader for i in (batch.tolist() if window.share.size else [])] for _ in range(number)]


def rank() -> int:
    return dist.get_rank()


def two_sharded() -> Any:
    """(this rank's order, the order from the second window of epoch 1 on, after a resume)"""
    loader = loaded(Halves(Numbers(), num_replicas=2, rank=Engine(accelerator="cpu").process_index), batch_size=2)
    found = passes(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = loaded(Halves(Numbers(), 2, rank()), batch_size=2)
    other.load_state_dict(state)
    return found + passes(other), len(loader), state["position"]


def two_wrapped() -> Any:
    class Mine(BatchSampler):
        pass

    inner = Halves(Numbers(), 2, rank())
    return passes(prepared(DataLoader(Numbers(), batch_sampler=Mine(inner, 3, False))))


def two_unknown_parts() -> Any:
    class Parts(Turning):
        def __iter__(self) -> Iterator[int]:
            return iter(range(rank(), 20, 2))

    try:
        return passes(loaded(Parts()))
    except ValueError as error:
        return str(error)


def two_own_random_state() -> Any:
    class Own(Turning):
        def __init__(self) -> None:
            self.own = random.Random(rank())

        def __iter__(self) -> Iterator[int]:
            return iter(self.own.sample(range(20), 20))

        def __len__(self) -> int:
            return 20

    return passes(loaded(Own()), 2)


def two_generators_of_ranks() -> Any:
    return passes(
        prepared(DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank()))), 2
    )


def two_weighted() -> Any:
    return passes(loaded(WeightedRandomSampler([1.0] * 20, 50)))


def two_buckets() -> Any:
    loader = prepared(DataLoader(Numbers(), batch_sampler=Buckets()))
    return passes(loader, 2)


def two_parts_of_a_dataset() -> Any:
    class Part(Numbers):
        presharded = True

    shuffled = prepared(DataLoader(Part(3 + 4 * rank()), batch_size=2, shuffle=True), accumulate_grad_batches=2)
    divisors = [round(share.divisor, 6) for share in (shuffled._window.share for _ in shuffled)]
    return [sorted(each) for each in passes(shuffled)], divisors, len(shuffled)


def two_lengths() -> Any:
    try:
        return read(prepared(DataLoader(Numbers(20 + rank()))))
    except ValueError as error:
        return str(error)


def two_misfit() -> Any:
    try:
        return read(loaded(Halves(Numbers(), 2, 0)))
    except ValueError as error:
        return str(error)


def two_counting() -> Any:
    first = loaded(Turning(), batch_size=1)
    passes(first)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    other = loaded(Turning(), batch_size=1)
    other.load_state_dict(state)
    return passes(other, 2)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_")


def test_a_distributed_sampler_of_the_users_is_read_on_each_rank(two: Any) -> None:
    assert two["sharded"] == [
        [[list(range(10)), list(range(2, 10))], 5, 4],
        [[list(range(10, 20)), list(range(12, 20))], 5, 4],
    ]
    assert two["wrapped"] == [[list(range(10))], [list(range(10, 20))]]


def test_a_misfit_is_reported_by_all_ranks(two: Any) -> None:
    assert len(set(two["misfit"])) == 1
    assert two["misfit"][0].startswith("rank 1: Halves yields shard 0 of 2, but this is rank 1 of 2")


def test_parts_that_nothing_speaks_of_are_an_error(two: Any) -> None:
    assert len(set(two["unknown_parts"])) == 1
    assert two["unknown_parts"][0].startswith(
        "Parts yields different samples on each rank, without declaring that it divides the data"
    )


def test_random_states_of_ranks_give_one_order(two: Any) -> None:
    for name in ("own_random_state", "generators_of_ranks"):
        first, second = zip(*two[name], strict=True)
        assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == list(range(20))
        assert first != second
    assert sum(len(found[0]) for found in two["weighted"]) == 50


def test_buckets_are_dealt_whole_and_once(two: Any) -> None:
    for epoch in range(2):
        own = Buckets()
        own.set_epoch(epoch)
        batches = list(own)
        assert [found[epoch] for found in two["buckets"]] == [[i for b in batches[r::2] for i in b] for r in range(2)]


def test_parts_of_a_dataset_stay_where_they_are(two: Any) -> None:
    """Parts of 3 and 7 samples in batches of 2, by windows of 2: 2 + 1 and 2 + 2 samples, then none and 2 + 1."""
    (first, divisors_0, length_0), (second, divisors_1, length_1) = two["parts_of_a_dataset"]
    assert (first, second) == ([list(range(3))], [list(range(7))])
    assert length_0 == length_1 == 4
    # A mean over n samples, divided by this and averaged over 2 ranks, weighs n of the window's 7, or 3.
    assert divisors_0 == [round(7 / (2 * 2), 6), round(7 / (1 * 2), 6), 1.0, 1.0]
    assert divisors_1 == [round(7 / (2 * 2), 6), round(7 / (2 * 2), 6), round(3 / (2 * 2), 6), round(3 / (1 * 2), 6)]


def test_other_data_on_each_rank_is_an_error(two: Any) -> None:
    assert two["lengths"][0] == two["lengths"][1]
    assert two["lengths"][0].startswith("the ranks' datasets have 20, 21 samples: every rank must have the whole data")


def test_a_counting_sampler_is_resumed_on_two_ranks(two: Any) -> None:
    assert two["counting"] == [[[4, 0], [3, 5, 1]], [[5, 1], [4, 0, 2]]]
