"""Loaders that pad: batches, ends, positions; the expected lists are worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader, Dataset, IterableDataset

from engine import Engine
from engine.compat.accelerate.padded_loaders import Loader, concatenated, padded, split_over
from engine.interop.accelerate import Accelerator, skip_first_batches
from engine.interop.accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from engine.interop.accelerate.utils import DataLoaderConfiguration


class Numbers(Dataset[int]):
    epoch = -1

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


def one_of_two(loader: Any, rank: int, **options: Any) -> Any:
    reading: list[Any] = []
    return padded(loader, Engine(accelerator="cpu").group, reading, processes=(2, rank), **options)


def passed(loader: Any) -> list[tuple[list[int], bool]]:
    """Each batch of a pass, and whether it was said to be the last."""
    return [(batch.tolist(), bool(loader.end_of_dataloader)) for batch in loader]


def test_the_last_batch_is_known_and_filled_up() -> None:
    loaders = [one_of_two(DataLoader(Numbers(7), batch_size=2), rank) for rank in range(2)]
    assert passed(loaders[0]) == [([0, 1], False), ([4, 5], True)]
    assert passed(loaders[1]) == [([2, 3], False), ([6, 0], True)]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert [loader.total_batch_size for loader in loaders] == [4, 4]
    assert [loader.remainder for loader in loaders] == [3, 3]  # of 7 samples in steps of 4
    uneven = [one_of_two(DataLoader(Numbers(5), batch_size=2), rank, even_batches=False) for rank in range(2)]
    assert [passed(loader) for loader in uneven] == [[([0, 1], False), ([4], True)], [([2, 3], True)]]


def test_split_batches() -> None:
    loaders = [one_of_two(DataLoader(Numbers(6), batch_size=4), rank, split_batches=True) for rank in range(2)]
    assert [passed(loader) for loader in loaders] == [
        [([0, 1], False), ([4, 5], True)],
        [([2, 3], False), ([0, 1], True)],
    ]
    assert loaders[0].total_batch_size == 4
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of 2"):
        one_of_two(DataLoader(Numbers(6), batch_size=3), 0, split_batches=True)


def test_a_stream_is_dealt_out() -> None:
    found = [passed(one_of_two(DataLoader(Stream(), batch_size=2), rank)) for rank in range(2)]
    assert found == [[([0, 1], False), ([4, 5], True)], [([2, 3], False), ([6, 0], True)]]


def test_the_innermost_pass_is_last_in_the_list() -> None:
    reading: list[Any] = []
    group = Engine(accelerator="cpu").group
    outer, inner = (padded(DataLoader(Numbers(2)), group, reading, processes=(1, 0)) for _ in range(2))
    for _ in outer:
        assert reading == [outer]
        for _ in inner:
            assert reading == [outer, inner]
            break  # an unfinished pass is left
        assert reading == [outer]
    assert reading == []


def test_epochs_are_counted_and_told() -> None:
    data = Numbers(4)
    loader = one_of_two(DataLoader(data, batch_size=2), 0)
    list(loader)
    assert (loader.iteration, data.epoch) == (1, 0)
    next(iter(loader))
    assert (loader.iteration, data.epoch) == (1, 1)  # left before its end
    loader.set_epoch(5)
    list(loader)
    assert (loader.iteration, data.epoch) == (6, 5)


def test_a_seedable_order_follows_from_seed_and_epoch() -> None:
    loader = one_of_two(DataLoader(Numbers(6), batch_size=3, shuffle=True), 1, seedable=True, seed=7)
    for epoch in range(2):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        assert passed(loader) == [(order[3:], True)]


def test_batches_are_skipped_in_one_pass_only() -> None:
    loader = one_of_two(DataLoader(Numbers(12), batch_size=2), 0)
    rest = loader.skipping(2)
    assert len(rest) == 1
    assert passed(rest) == [([8, 9], True)]
    assert [batch for batch, _ in passed(loader)] == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_pass_with_skipped_batches_is_a_pass_of_the_loader(dispatch: bool) -> None:
    reading: list[Any] = []
    data: Any = DataLoader(Numbers(6), batch_size=2, shuffle=True)
    group = Engine(accelerator="cpu").group
    loader = padded(data, group, reading, processes=(1, 0), seedable=True, seed=7, dispatch=dispatch)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(7 + epoch)).tolist() for epoch in range(3)]
    list(loader)
    rest, states = loader.skipping(1), []
    for batch in rest:
        assert batch.tolist() == orders[1][2 * len(states) + 2 : 2 * len(states) + 4]
        states.append({name: loader.state_dict()[name] for name in ("epoch", "given")})
    assert states == [{"epoch": 1, "given": 2}, {"epoch": 2, "given": 0}]
    assert [number for batch, _ in passed(loader) for number in batch] == orders[2]


@pytest.mark.parametrize("processes", [(2, 0), (2, 1), (1, 0)])
def test_a_shuffled_pass_continues_from_its_state(processes: tuple[int, int]) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        data: Any = DataLoader(Numbers(16), batch_size=2, shuffle=True)
        return padded(data, Engine(accelerator="cpu").group, [], processes=processes)

    loader = made(3)
    whole = [batch.tolist() for batch in loader]
    following = [batch.tolist() for batch in loader]
    assert whole != following
    loader = made(3)
    list(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["given"]) == (1, 1)
    other = made(4)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == following[1:]
    other.load_state_dict(state)
    other.restart()
    assert [batch.tolist() for batch in other] == following
    assert loader.state_dict()["given"] == 1
    list(batches)
    assert (loader.state_dict()["epoch"], loader.state_dict()["given"]) == (2, 0)


def test_an_exact_loader_says_where_it_stands() -> None:
    engine, reading = Engine(accelerator="cpu"), []  # type: ignore[var-annotated]
    loader = Loader(engine.prepare(DataLoader(Numbers(5), batch_size=2)), engine.group, reading)
    assert passed(loader) == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert (loader.remainder, loader.total_batch_size, loader.total_dataset_length) == (0, 2, 5)
    assert passed(loader.skipping(1)) == [([2, 3], False), ([4], True)]
    stream = Loader(engine.prepare(DataLoader(Stream(), batch_size=2)), engine.group, reading)
    for _ in stream:
        with pytest.raises(RuntimeError, match=r"data without a length: .*rules='accelerate'"):
            _ = stream.end_of_dataloader


def test_a_global_batch_is_split() -> None:
    loader = split_over(DataLoader(Numbers(8), batch_size=4, drop_last=True), 2)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (2, True, 4)
    with pytest.raises(ValueError, match="batch_size=4 of the DataLoader must be a multiple of 3"):
        split_over(DataLoader(Numbers(8), batch_size=4), 3)
    with pytest.raises(ValueError, match="batch_size=None"):
        split_over(DataLoader(Numbers(8), batch_size=None), 2)


def test_trees_are_joined() -> None:
    trees = [
        {"a": torch.tensor([1]), "b": [torch.tensor([[2.0]])]},
        {"a": torch.tensor([3]), "b": [torch.tensor([[4.0]])]},
    ]
    found = concatenated(trees)
    assert (found["a"].tolist(), found["b"][0].tolist()) == ([1, 3], [[2.0], [4.0]])


def test_batches_of_one_step_fit_together() -> None:
    def rows(items: list[int]) -> torch.Tensor:
        return torch.zeros(2, items[0] + 1)

    group = Engine(accelerator="cpu").group
    loader: Any = padded(
        DataLoader(Numbers(4), batch_size=2, collate_fn=rows), group, [], processes=(1, 0), dispatch=True
    )
    assert [batch.shape for batch in loader] == [(2, 1), (2, 3)]
    with pytest.raises(RuntimeError):
        concatenated([torch.zeros(2, 1), torch.zeros(2, 3)])


# -- on two ranks ---------------------------------------------------------------------------------------------------------------


def dispatched(loader: Any, **options: Any) -> Any:
    group = Engine(accelerator="cpu").group
    found = padded(loader, group, [], processes=(2, group.rank), dispatch=True, **options)
    return [*passed(found), found.remainder, len(found)]


def rank_dispatched() -> Any:
    return dispatched(DataLoader(Numbers(7), batch_size=2))


def rank_split() -> Any:
    return dispatched(DataLoader(Numbers(6), batch_size=4), split_batches=True)


def rank_dropped() -> Any:
    return dispatched(DataLoader(Numbers(7), batch_size=2, drop_last=True))


def rank_cut() -> Any:
    def last_first(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        return batch.flip(0)[part] + 100 * process_index * num_processes

    return dispatched(DataLoader(Numbers(4), batch_size=2), slice_fn=last_first)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_the_main_process_sends_each_global_batch(two: dict[str, list[Any]]) -> None:
    assert two["dispatched"] == [
        [[[0, 1], False], [[4, 5], True], 3, 2],
        [[[2, 3], False], [[6, 0], True], 3, 2],
    ]
    assert two["split"] == [[[[0, 1], False], [[4], True], 2, 2], [[[2, 3], False], [[5], True], 2, 2]]
    assert two["dropped"] == [[[[0, 1], True], 4, 1], [[[2, 3], True], 4, 1]]
    assert two["cut"] == [[[[3, 2], True], 4, 1], [[[201, 200], True], 4, 1]]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_loaders_that_a_script_makes(kind: Any) -> None:
    loader = kind(list(range(10)), batch_size=4, skip_batches=1, use_stateful_dataloader=True)
    expected = [([4, 5, 6, 7], False), ([8, 9], True)]
    assert passed(loader) == passed(loader) == expected
    state = None
    for batch in loader:
        state = state or (loader.state_dict(), batch.tolist())
    other = kind(list(range(10)), batch_size=4)
    assert state is not None
    other.load_state_dict(state[0])
    assert [batch.tolist() for batch in other] == [[8, 9]]
    assert passed(other) == [([0, 1, 2, 3], False), *expected]
    loader.set_epoch(3)
    assert skip_first_batches(loader, 2).iteration == 3
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == [[8, 9]]


def test_a_loader_that_skips() -> None:
    loader = SkipDataLoader(Numbers(6), skip_batches=2, batch_size=2, use_stateful_dataloader=True)
    assert (passed(loader), len(loader)) == ([([4, 5], True)], 1)


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_prepared_loader_counts_as_the_users_class(rules: Any, dispatch: bool) -> None:
    class Own(DataLoader[int]):
        pass

    if dispatch and rules == "exact":
        return
    accelerator = Accelerator(
        cpu=True, rules=rules, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
    )
    loader = accelerator.prepare(Own(Numbers(6), batch_size=2))
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, Own)
    assert isinstance(loader, DataLoaderDispatcher if dispatch else DataLoaderShard)
    assert not isinstance(loader, SkipDataLoader)
    assert not isinstance(loader, DataLoaderShard if dispatch else DataLoaderDispatcher)
    assert not isinstance(DataLoader(Numbers(6)), DataLoaderShard)
    assert accelerator.prepare(loader) is loader
    assert [batch.tolist() for batch in copy.copy(loader)] == [batch.tolist() for batch in loader]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == [batch.tolist() for batch in loader][2:]
