"""States of users' data by other libraries' protocols: Grain's iterators are resumed, litData's data is read again, torchdata's graphs are checked.

Grain and litData are stand-ins with the methods of the real classes; torchdata is itself. Expected batches come from a bare loop.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.internals import forget_warnings
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import sampler as torchdata_sampler

from engine import CombinedLoader, Engine
from engine.data.data_states import stateful


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


class GrainIterator(Iterator[list[int]]):
    """As ``grain.DatasetIterator``: its state is a dict."""

    def __init__(self) -> None:
        self.next_index = 0

    def __next__(self) -> list[int]:
        if self.next_index == 8:
            raise StopIteration
        self.next_index += 1
        return [2 * self.next_index - 2, 2 * self.next_index - 1]

    def get_state(self) -> Any:
        return {"next_index": self.next_index}

    def set_state(self, state: Any) -> None:
        self.next_index = state["next_index"]


class PyGrainIterator(GrainIterator):
    """As the iterator of ``grain.DataLoader``: its state is bytes."""

    def get_state(self) -> Any:
        return json.dumps({"next_index": self.next_index}).encode()

    def set_state(self, state: Any) -> None:
        self.next_index = json.loads(state.decode())["next_index"]


class Grain(IterableDataset[list[int]]):
    def __init__(self, kind: type[GrainIterator] = GrainIterator) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[list[int]]:
        return self.kind()


class LitData(IterableDataset[int]):
    """As ``litdata.StreamingDataset``."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, Any]:
        return {"num_samples_yielded": num_samples_yielded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Forwarding(IterableDataset[Any]):
    """A wrapper that forwards what it does not have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def prepared(data: Any) -> Any:
    return Engine(accelerator="cpu", seed=3).prepare_data_loader(data)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def resumed(make: Any) -> list[Any]:
    """All batches of two passes, of which the first is read by two loaders: the second one continues after three batches."""
    loader = prepared(make())
    batches = iter(loader)
    found = [plain(next(batches)) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    other = prepared(make())
    other.load_state_dict(state)
    return [*found, *map(plain, other), *map(plain, other)]


SOURCES = {
    "dict": Grain,
    "bytes": lambda: Grain(PyGrainIterator),
    "loader": lambda: DataLoader(Grain(), batch_size=None),
    "member": lambda: CombinedLoader({"a": Grain(), "b": Grain(PyGrainIterator)}),
    "forwarded": lambda: Forwarding(Grain(PyGrainIterator)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_grains_iterators_are_resumed_without_reading_again(name: str) -> None:
    whole = [plain(batch) for batch in SOURCES[name]()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resumed(SOURCES[name]) == whole + whole


@pytest.mark.parametrize("data", [LitData(), Forwarding(LitData())])
def test_a_data_set_whose_state_needs_arguments_is_trained_and_read_again(data: Any) -> None:
    assert not stateful(data)
    with pytest.warns(UserWarning, match="3 batches are read and discarded"):
        found = resumed(lambda: DataLoader(data, batch_size=2))
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]] * 2


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def graph(indices: Any) -> Any:
    return nodes.Loader(nodes.Batcher(nodes.Mapper(indices, Numbers().__getitem__), batch_size=2))


def mixture(indices: Any) -> Any:
    sources = {"a": indices, "b": nodes.IterableWrapper(range(4))}
    return nodes.Loader(nodes.Prefetcher(nodes.MultiNodeWeightedSampler(sources, {"a": 1.0, "b": 1.0}), 2))


class Following(RandomSampler):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist())


FORGETFUL = {
    "random": lambda: nodes.SamplerWrapper(RandomSampler(Numbers())),
    "weighted": lambda: nodes.SamplerWrapper(WeightedRandomSampler([1.0] * 8, 8)),
    "torchdata's, whose iterator has the state": lambda: nodes.SamplerWrapper(
        torchdata_sampler.RandomSampler(Numbers())
    ),
    "torchdata's, iterated": lambda: nodes.IterableWrapper(torchdata_sampler.RandomSampler(Numbers())),
    "iterated": lambda: nodes.IterableWrapper(RandomSampler(Numbers())),
}
LASTING = {
    "sequential": lambda: nodes.SamplerWrapper(SequentialSampler(Numbers())),
    "by epoch": lambda: nodes.SamplerWrapper(Following(Numbers())),
    "with a state": lambda: nodes.SamplerWrapper(torchdata_sampler.StatefulDistributedSampler(Numbers(), 1, 0)),
}


@pytest.mark.parametrize("make", [graph, mixture])
@pytest.mark.parametrize("name", FORGETFUL)
def test_a_graph_over_a_sampler_without_state_warns(make: Any, name: str) -> None:
    with pytest.warns(UserWarning, match="RandomSampler, whose order a resume within an epoch cannot draw again"):
        prepared(make(FORGETFUL[name]()))


@pytest.mark.parametrize("name", LASTING)
def test_a_graph_over_a_sampler_with_a_place_is_resumed_without_a_word(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = prepared(graph(LASTING[name]()))
        batches = iter(loader)
        next(batches)
        state = copy.deepcopy(loader.state_dict())
        rest = [plain(batch) for batch in batches]
        other = prepared(graph(LASTING[name]()))
        other.load_state_dict(state)
        assert [plain(batch) for batch in other] == rest
