"""Streams of Hugging Face's ``datasets`` with a shuffle buffer: its ``state_dict`` leaves out what the buffer holds, so they are read again.

Expected orders come from iterating the dataset itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from engine import CombinedLoader, Engine


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for index in range(6):
            yield {"x": 6 * shard + index}


def plain() -> Any:
    return datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})


def shuffled(seed: int | None = 1) -> Any:
    return plain().shuffle(seed=seed, buffer_size=7)


def mapped() -> Any:
    return shuffled().map(_same).take(20)


def mixed() -> Any:
    return datasets.interleave_datasets([shuffled(), plain()], probabilities=[0.5, 0.5], seed=3)


def _same(example: dict[str, int]) -> dict[str, int]:
    return example


def prepared(data: Any) -> Any:
    return Engine(accelerator="cpu", seed=1).prepare_data_loader(data)


def read(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch["x"]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's constructor under this torch
@pytest.mark.parametrize("make", [shuffled, mapped, mixed])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_shuffled_stream_is_resumed_exactly_and_says_what_it_costs(make: Any, kind: Any) -> None:
    own = make()
    own.set_epoch(1)
    expected = [example["x"] for example in own]
    first = prepared(kind(make(), batch_size=2))
    first.set_epoch(1)
    batches = iter(first)
    found = [int(x) for _ in range(4) for x in next(batches)["x"]]
    state = first.state_dict()
    del batches
    other = prepared(kind(make(), batch_size=2))
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"does not include its shuffle buffer\): 4 batches are read and discarded"):
        assert found + read(other) == expected


def test_with_workers() -> None:
    first = prepared(DataLoader(shuffled(), batch_size=2, num_workers=2))
    expected = read(first)
    first.set_epoch(0)
    batches = iter(first)
    next(batches), next(batches), next(batches)
    state = first.state_dict()
    del batches
    other = prepared(DataLoader(shuffled(), batch_size=2, num_workers=2))
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="3 batches are read and discarded"):
        assert read(other) == expected[6:]


def test_beside_other_data() -> None:
    def make() -> Any:
        return prepared(CombinedLoader({"a": DataLoader(shuffled(), batch_size=2), "b": [torch.ones(1)] * 12}))

    def pairs(loader: Any) -> list[int]:
        return [int(x) for batch in loader for x in batch["a"]["x"]]

    first = make()
    expected = pairs(first)
    first.set_epoch(0)
    batches = iter(first)
    next(batches), next(batches)
    other = make()
    other.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="2 batches are read and discarded"):
        assert pairs(other) == expected[4:]


def test_a_stream_without_a_buffer_is_entered_by_its_state() -> None:
    first = prepared(DataLoader(plain(), batch_size=2))
    batches = iter(first)
    next(batches), next(batches)
    other = prepared(DataLoader(plain(), batch_size=2))
    other.load_state_dict(first.state_dict())
    assert read(other) == list(range(4, 24))


def test_without_a_seed_the_order_is_another_and_that_is_said() -> None:
    first = prepared(DataLoader(shuffled(None), batch_size=2))
    batches = iter(first)
    next(batches)
    other = prepared(DataLoader(shuffled(None), batch_size=2))
    other.load_state_dict(first.state_dict())
    with (
        pytest.warns(UserWarning, match="shuffled in another order than before the resume"),
        pytest.warns(UserWarning, match="1 batches are read"),
    ):
        read(other)


def two_seeds() -> Any:
    engine = Engine(accelerator="cpu", seed=1)
    try:
        engine.prepare_data_loader(DataLoader(shuffled(None), batch_size=2))
    except ValueError as error:
        said = str(error)
    loader = engine.prepare_data_loader(DataLoader(shuffled(), batch_size=2))
    return said, [int(x) for batch in loader for x in (batch["x"] if engine.window.share.size else [])]


def test_ranks_that_shuffle_differently_are_an_error() -> None:
    found = ranks_of_file(__file__, 2, "two_")["seeds"]
    assert all(said.startswith("the ranks shuffle this stream differently") for said, _ in found)
    assert sorted(found[0][1] + found[1][1]) == list(range(24))
