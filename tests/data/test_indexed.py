"""Micro-batches of data with indices. The group is a stand-in: feeds ask it for rank and world size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from engine.data.indexed import indexed_feed


@dataclass
class Stand:
    world_size: int = 1
    rank: int = 0
    cpu: Any = None
    is_main: bool = True  # each draws for itself: nothing is broadcast here


def feed(data: Any, world_size: int = 1, rank: int = 0, seed: int = 0) -> Any:
    return indexed_feed(data, Stand(world_size, rank), seed)  # type: ignore[arg-type]


def read(source: Any, epoch: int = 0, start: int = 0, window: int = 1, limit: int | None = None) -> list[list[int]]:
    """The samples of each micro-batch that counts."""
    return [batch.tolist() for batch, share in source.micro_batches(epoch, start, window, limit) if share.size]


def everywhere(data: Any, world_size: int, **options: Any) -> list[int]:
    """All samples of an epoch in the order of global batches."""
    ranks = [read(feed(data, world_size, rank), **options) for rank in range(world_size)]
    return sorted(i for rank in ranks for batch in rank for i in batch)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


# -- samples ----------------------------------------------------------------------------------------------------------------------


def test_shuffle_false_keeps_the_order() -> None:
    loader = DataLoader(Numbers(10), batch_size=2)
    assert read(feed(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert read(feed(loader, 2, 0)) == [[0, 1], [4, 5], [8]]
    assert read(feed(loader, 2, 1)) == [[2, 3], [6, 7], [9]]


def test_shuffle_is_one_order_for_any_world_size() -> None:
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    whole = [i for batch in read(feed(loader, seed=5)) for i in batch]
    assert sorted(whole) == list(range(24))
    assert whole != list(range(24))
    halves = [read(feed(loader, 2, rank, seed=5)) for rank in range(2)]
    assert [i for pair in zip(*halves, strict=True) for batch in pair for i in batch] == whole
    assert [i for batch in read(feed(loader, seed=5), epoch=1) for i in batch] != whole
    assert [i for batch in read(feed(loader, seed=6)) for i in batch] != whole


def test_a_position_is_entered_directly() -> None:
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    source = feed(loader, 2, 1, seed=5)
    assert source.stride(3) == 12
    assert read(source, start=12, window=3) == read(source, window=3)[3:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_is_not_sharded_twice(shuffle: bool, drop_last: bool) -> None:
    data = Numbers(11)
    found = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        source = feed(DataLoader(data, batch_size=2, sampler=sampler), 2, rank)
        found += [i for batch in read(source) for i in batch]
    assert len(found) == len(set(found)) == (8 if drop_last else 11)
    assert shuffle or sorted(found) == list(range(8 if drop_last else 11))


def test_a_generator_of_the_users_gives_the_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        return read(feed(DataLoader(Numbers(20), shuffle=True, generator=torch.Generator().manual_seed(seed)), seed=9))

    assert order(1) == order(1)
    assert order(1) != order(2)


class Odd(Sampler[int]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([5, 3, 1])

    def __len__(self) -> int:
        return 3


def test_a_sampler_of_the_users_is_dealt() -> None:
    sampler = Odd()
    assert read(feed(DataLoader(Numbers(6), batch_size=2, sampler=sampler)), epoch=4) == [[5, 3], [1]]
    assert sampler.epochs == [4]
    assert read(feed(DataLoader(Numbers(6), sampler=Odd()), 2, 1)) == [[3]]


@pytest.mark.parametrize("sampler", [WeightedRandomSampler([1.0] * 9, 9), RandomSampler(Numbers(9), replacement=True)])
def test_random_samplers_draw_the_same_for_an_epoch_and_leave_the_generator(sampler: Any) -> None:
    source = feed(DataLoader(Numbers(9), batch_size=3, sampler=sampler), seed=1)
    state = torch.get_rng_state()
    first = list(source.order.draw(2))
    torch.manual_seed(99)
    assert list(source.order.draw(2)) == first
    assert list(source.order.draw(3)) != first
    torch.set_rng_state(state)
    source.order.draw(2)
    assert torch.equal(state, torch.get_rng_state())


def test_a_batch_sampler_that_the_user_made_of_torchs_class() -> None:
    loader = DataLoader(Numbers(7), batch_sampler=BatchSampler(Odd(), 2, drop_last=True))
    assert read(feed(loader)) == [[5, 3]]
    loader = DataLoader(Numbers(7), batch_sampler=BatchSampler(RandomSampler(Numbers(7)), 3, drop_last=False))
    assert [len(batch) for batch in read(feed(loader))] == [3, 3, 1]
    assert read(feed(loader, seed=1)) != read(feed(loader, seed=2))
    shared = DataLoader(
        Numbers(4), batch_sampler=BatchSampler(DistributedSampler(Numbers(4), 2, 0, shuffle=False), 1, drop_last=False)
    )
    assert everywhere(shared, 2) == [0, 1, 2, 3]


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(1),
        "python": random.Random(1),
        "numpy": numpy.random.default_rng(1),
        "old numpy": numpy.random.RandomState(1),
    }


def taken(own: Any, count: int) -> list[int]:
    if isinstance(own, torch.Generator):
        return torch.randperm(count, generator=own).tolist()
    if isinstance(own, random.Random):
        return own.sample(range(count), count)
    return [int(i) for i in own.permutation(count)]


class WithOwn(Sampler[int]):
    """It has a generator of its own, which continues from pass to pass."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __iter__(self) -> Iterator[int]:
        return iter(taken(self.own, 20))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("kind", list(generators()))
@pytest.mark.parametrize("inside", [False, True])
def test_a_samplers_own_generator_follows_the_epoch(kind: str, inside: bool) -> None:
    class Wrapped(BatchSampler):
        pass

    def source(own: Any = None) -> Any:
        sampler = WithOwn(generators()[kind] if own is None else own)
        options: Any = (
            {"batch_sampler": Wrapped(sampler, 20, False)} if inside else {"sampler": sampler, "batch_size": 20}
        )
        return feed(DataLoader(Numbers(20), **options))

    first = source()
    orders = [read(first, epoch) for epoch in range(3)]
    assert [read(source(), epoch) for epoch in (2, 1, 0)] == orders[::-1]  # in another process, entered anywhere
    assert len({str(order) for order in orders}) == 3
    own = generators()[kind]
    taken(own, 3)  # another place of the user's own sequence, or another seed
    if kind == "torch":
        own.manual_seed(2)
    assert read(source(own), 0) != orders[0]


def test_a_generator_is_left_as_the_user_had_it() -> None:
    for kind, own in generators().items():
        expected = taken(generators()[kind], 20)
        read(feed(DataLoader(Numbers(20), sampler=WithOwn(own))), 3)
        assert taken(own, 20) == expected


@pytest.mark.parametrize("generator", [False, True])
def test_a_weighted_sampler_keeps_its_distribution(generator: bool) -> None:
    weights = [1.0, 2.0, 5.0, 0.0]
    own = torch.Generator().manual_seed(7) if generator else None
    loader = DataLoader(Numbers(4), batch_size=100, sampler=WeightedRandomSampler(weights, 4000, generator=own))
    drawn = torch.tensor([i for epoch in range(5) for batch in read(feed(loader, 2, 0), epoch) for i in batch])
    counts = torch.bincount(drawn, minlength=4) / len(drawn)
    assert counts.tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0.0], abs=0.02)  # 10,000 draws: a deviation of 0.005


def test_a_sampler_without_a_length() -> None:
    class Unsized(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([4, 2, 0])

    source = feed(DataLoader(Numbers(5), sampler=Unsized(), batch_size=2))
    assert source.length(None) is None
    assert read(source) == [[4, 2], [0]]


def test_without_batching_a_shuffled_index_is_a_number() -> None:
    class Keyed(Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            assert type(index) is int
            return index

    source = feed(DataLoader(Keyed(), batch_size=None, shuffle=True))
    assert sorted(i for i, _ in source.micro_batches(0, 0, 1, None)) == list(range(6))


class Mine(DataLoader[int]):
    """A subclass whose constructor nobody else can call."""

    def __init__(self, secret: str, **options: Any) -> None:
        super().__init__(Numbers(6), **options)
        self.secret = secret


def test_the_users_loader_keeps_its_class_and_is_not_changed() -> None:
    loader = Mine("s", batch_size=4, collate_fn=lambda items: torch.tensor(items) * 10)
    source = feed(loader)
    assert type(source.loader) is Mine
    assert source.loader.secret == "s"
    assert read(source) == [[0, 10, 20, 30], [40, 50]]
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50]]
    assert type(loader.batch_sampler) is BatchSampler


def test_workers_get_the_right_samples() -> None:
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=1, persistent_workers=True)
    source = feed(loader, 2, 1)
    for _ in range(2):
        assert read(source) == [[2, 3], [6, 7], [9]]


@pytest.mark.parametrize(("drop_last", "lengths"), [(False, (5, 3, 2)), (True, (4, 2, 1))])
def test_lengths(drop_last: bool, lengths: tuple[int, ...]) -> None:
    loader = DataLoader(Numbers(19), batch_size=4, drop_last=drop_last)
    for world_size, expected in zip((1, 2, 3), lengths, strict=True):
        sources = [feed(loader, world_size, rank) for rank in range(world_size)]
        assert [source.length(None) for source in sources] == [expected] * world_size
        assert sources[0].length(1) == 1
        assert len(list(sources[-1].micro_batches(0, 0, 2, None))) == expected


def test_a_limit_is_in_micro_batches_of_a_rank() -> None:
    loader = DataLoader(Numbers(19), batch_size=2)
    assert read(feed(loader, 2, 1), limit=2) == [[2, 3], [6, 7]]


# -- whole batches ----------------------------------------------------------------------------------------------------------------


def listed(*sizes: int) -> list[Tensor]:
    """Batches of these sizes, numbered through."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


def test_a_list_of_batches_is_a_sequence_of_batches() -> None:
    data = listed(2, 3, 1)
    assert read(feed(data)) == [[0, 1], [2, 3, 4], [5]]
    assert read(feed(data, 2, 0)) == [[0, 1], [5]]
    assert read(feed(data, 2, 1)) == [[2, 3, 4]]
    assert [feed(data, 2, r).length(None) for r in range(2)] == [2, 2]
    assert len(list(feed(data, 2, 1).micro_batches(0, 0, 1, None))) == 2  # the second one a repetition at weight 0


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_weigh_their_samples(world_size: int, window: int) -> None:
    data = listed(2, 3, 1, 4, 2)
    weights: dict[int, float] = {}
    for rank in range(world_size):
        for batch, share in feed(data, world_size, rank).micro_batches(0, 0, window, None):
            for sample in batch.tolist() if share.size else []:
                weights[sample] = 1 / (len(batch) * share.divisor * world_size)
    bounds = [0, 2, 5, 6, 10, 12]
    step = world_size * window
    for low in range(0, 5, step):  # global batches of so many batches
        samples = range(bounds[low], bounds[min(low + step, 5)])
        assert [weights[i] for i in samples] == pytest.approx([1 / len(samples)] * len(samples))


def test_a_batch_sampler_of_the_users_keeps_its_batches() -> None:
    class Uneven(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1, 2], [3], [4, 5]])

        def __len__(self) -> int:
            return 3

    loader = DataLoader(Numbers(6), batch_sampler=Uneven())
    assert read(feed(loader)) == [[0, 1, 2], [3], [4, 5]]
    assert read(feed(loader, 2, 0)) == [[0, 1, 2], [4, 5]]
    assert read(feed(loader, 2, 1)) == [[3]]
    shares = [share for _, share in feed(loader, 2, 0).micro_batches(0, 0, 1, None)]
    assert shares[0].divisor == pytest.approx(4 / 6)


def test_a_batch_sampler_without_a_length() -> None:
    class Endless(BatchSampler):
        def __len__(self) -> int:
            raise TypeError

    class Other(Endless):
        pass

    loader = DataLoader(Numbers(5), batch_sampler=Other(SequentialSampler(Numbers(5)), 2, False))
    assert feed(loader).length(None) is None
    assert read(feed(loader)) == [[0, 1], [2, 3], [4]]


def test_without_batching_samples_are_batches() -> None:
    loader = DataLoader(Subset(listed(2, 3, 1), range(3)), batch_size=None)
    assert read(feed(loader, 2, 1)) == [[2, 3, 4]]
