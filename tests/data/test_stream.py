"""Streams are entered in the middle of an epoch: nothing lost, nothing twice, with and without workers, at any world size.

Expected batches come from a bare loop over the same loader.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any

import numpy
import pytest
import torch
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata_sampler

from engine import CombinedLoader, Engine, Fit, TrainModule
from engine.data.stream import InProcessReader, StreamFeed, StreamReader, WorkerReader, reader_for


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


class Numbers(IterableDataset[int]):
    """0, 1, 2, ...; worker w of n has w, w + n, ..."""

    def __init__(self, count: int = 23) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self) -> range:
        worker = get_worker_info()
        own = range(worker.id, self.count, worker.num_workers) if worker else range(self.count)
        return range(own.start + 100 * self.epoch, own.stop + 100 * self.epoch, own.step)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            self.read += 1
            yield number


class Stateful(Numbers):
    """The dataset itself says where it is."""

    def __init__(self, count: int = 23) -> None:
        super().__init__(count)
        self.at = 0
        self.history: list[int] = []
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.at, self.history = 0, []
        self.loaded = False
        return self.going_on(self.numbers())

    def going_on(self, numbers: range) -> Iterator[int]:
        while self.at < len(numbers):
            self.at += 1
            self.read += 1
            self.history.append(self.at)
            yield numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"] == list(range(1, state["at"] + 1)), "the state is not of one moment"
        self.at, self.history, self.loaded = state["at"], list(state["history"]), True


class Mutating(Stateful):
    """Its state keeps changing after it was given."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "history": self.history}


class Walk(Iterator[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __next__(self) -> int:
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class ByIterator(Numbers):
    """Its iterator says where it is."""

    def __iter__(self) -> Iterator[int]:
        return Walk(self.numbers())


class Uneven(Stateful):
    """Worker 0 has 2 numbers, worker 1 has 13."""

    def numbers(self) -> range:
        worker = get_worker_info()
        assert worker is not None
        return range(2) if worker.id == 0 else range(1000, 1013)


def torchdatas(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # version 0.11 calls something that torch 2.13 warns of
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(*args, **options)


def prepared(data: Any, **settings: Any) -> tuple[Engine, Any]:
    engine = Engine(accelerator="cpu", seed=3, **settings)
    return engine, engine.prepare_data_loader(data)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def bare(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def epoch_1(batches: list[Any]) -> list[Any]:
    return [[n + 100 for n in batch] if isinstance(batch, list) else batch + 100 for batch in batches]


LOADERS = {
    "dataset": lambda workers, **options: DataLoader(Mutating(), batch_size=3, num_workers=workers, **options),
    "iterator": lambda workers, **options: DataLoader(ByIterator(), batch_size=3, num_workers=workers, **options),
    "torchdata": lambda workers, **options: torchdatas(Stateful(), batch_size=3, num_workers=workers, **options),
    "torchdata, nothing stateful": lambda workers, **options: torchdatas(
        Numbers(), batch_size=3, num_workers=workers, **options
    ),
    "without batches": lambda workers, **options: DataLoader(
        Stateful(9), batch_size=None, num_workers=workers, **options
    ),
    "uneven workers": lambda workers, **options: DataLoader(Uneven(), batch_size=3, num_workers=2, **options),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [1, 2])
def test_resume_in_the_middle(name: str, workers: int, window: int) -> None:
    if (name == "uneven workers" and not workers) or (workers and window > 1 and name != "dataset"):
        return
    make = LOADERS[name]
    whole = bare(make(workers))
    places = range(window, len(whole) + window, window) if not workers else (window, 2 * window, len(whole))
    for place in places:
        _, loader = prepared(make(workers), accumulate_grad_batches=window)
        found, state = [], None
        for batch in loader:
            found.append(plain(batch))
            if len(found) >= min(place, len(whole)):
                state = loader.state_dict()
                break
        assert state is not None
        assert state["position"] == -(-place // window) * window
        loader.close()
        _, other = prepared(make(workers), accumulate_grad_batches=window)
        other.load_state_dict(state)
        found += bare(other)
        assert found == whole
        assert name == "uneven workers" or bare(other) == epoch_1(whole)
        other.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_stream_is_not_read_from_its_start(workers: int) -> None:
    data = Stateful(1000)
    _, loader = prepared(DataLoader(data, batch_size=2, num_workers=workers))
    loader.resume(0, 100, _state_at(workers, 100))
    first = next(iter(loader)).tolist()
    assert first == ([200, 201] if not workers else [200, 202])
    assert workers or data.read == 2
    loader.close()


def _state_at(workers: int, batches: int) -> Any:
    _, loader = prepared(DataLoader(Stateful(1000), batch_size=2, num_workers=workers))
    for number, _ in enumerate(loader, 1):
        if number == batches:
            state = loader.state()
            loader.close()
            return state
    raise AssertionError


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_inside_a_window_is_that_of_its_start(workers: int) -> None:
    whole = bare(DataLoader(Stateful(), batch_size=2, num_workers=workers))
    _, loader = prepared(DataLoader(Stateful(), batch_size=2, num_workers=workers), accumulate_grad_batches=3)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    inside = loader.state_dict()
    next(batches)
    assert (inside["position"], loader.position) == (3, 6)
    for state, at in ((inside["stream"], 3), (loader.state(3), 3), (loader.state(6), 6), (loader.state(), 6)):
        _, other = prepared(DataLoader(Stateful(), batch_size=2, num_workers=workers), accumulate_grad_batches=3)
        other.resume(0, at, state)
        assert bare(other) == whole[at:]
    with pytest.raises(ValueError, match=r"state\(position=1\): DataLoader is at 6"):
        loader.state(1)
    assert loader.state(0) is None


def test_a_resumed_loaders_state_before_its_first_window_is_over() -> None:
    def make() -> Any:
        return prepared(DataLoader(Stateful(), batch_size=2, num_workers=2), accumulate_grad_batches=3)[1]

    whole = bare(DataLoader(Stateful(), batch_size=2, num_workers=2))
    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    for again in range(3):
        other = make()
        other.load_state_dict(state)
        batches = iter(other)
        for batch in whole[3 : 3 + again]:
            assert next(batches).tolist() == batch
        assert other.state_dict() == state


def test_data_whose_end_was_seen_does_not_begin_again() -> None:
    """torchdata's loader, resumed from a state of its end, would begin the next epoch."""
    _, loader = prepared(torchdatas(Stateful(5), batch_size=2), accumulate_grad_batches=2)
    for batch in loader:
        if len(batch) == 1:
            state = loader.state_dict()
    assert state["position"] == 4
    assert state["stream"]["ended"]
    _, other = prepared(torchdatas(Stateful(5), batch_size=2), accumulate_grad_batches=2)
    other.load_state_dict(state)
    assert bare(other) == []
    assert bare(other) == [[100, 101], [102, 103], [104]]
    state = other.state_dict()
    assert (state["epoch"], state["position"]) == (2, 0)
    _, third = prepared(torchdatas(Stateful(5), batch_size=2), accumulate_grad_batches=2)
    third.load_state_dict(state)
    assert [len(batch) for batch in bare(third)] == [2, 2, 1]


class Endless(IterableDataset[float]):
    """Counts on from pass to pass, as the usual stream of a long training does."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Iterator[float]:
        while True:
            self.n += 1
            yield float(self.n)

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


@pytest.mark.parametrize("kind", [DataLoader, torchdatas])
def test_a_stream_counts_on_over_epochs(kind: Any) -> None:
    def make() -> Any:
        loader = prepared(kind(Endless(), batch_size=2))[1]
        loader.limit = 3
        return loader

    whole = make()
    expected = [bare(whole) for _ in range(3)]
    assert expected[2][0] == [13, 14]
    first = make()
    assert [bare(first) for _ in range(2)] == expected[:2]
    second = make()
    second.load_state_dict(first.state_dict())
    assert bare(second) == expected[2]


class Resets(Endless):
    """Starts again by itself at the end of a pass."""

    def __iter__(self) -> Iterator[float]:
        while self.n < 5:
            self.n += 1
            yield float(self.n)
        self.n = 0


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_short_last_batch_the_pass_is_over(workers: int) -> None:
    def make() -> Any:
        return prepared(DataLoader(Resets(), batch_size=2, num_workers=workers))[1]

    whole = bare(make())
    for count in range(1, len(whole) + 1):
        first = make()
        batches = iter(first)
        seen = [next(batches).tolist() for _ in range(count)]
        second = make()
        second.load_state_dict(first.state_dict())
        assert seen + bare(second) == whole, count


def test_what_has_no_state_is_counted() -> None:
    for workers in (0, 2):
        whole = bare(DataLoader(Numbers(), batch_size=3, num_workers=workers))
        _, loader = prepared(DataLoader(Numbers(), batch_size=3, num_workers=workers))
        batches = iter(loader)
        for _ in range(3 + workers):
            next(batches)
        state = loader.state_dict()
        assert state == {"epoch": 0, "position": 3 + workers, "stream": None}
        _, other = prepared(DataLoader(Numbers(), batch_size=3, num_workers=workers))
        other.load_state_dict(state)
        with pytest.warns(UserWarning, match=f"{3 + workers} batches are read and discarded"):
            assert bare(other) == whole[3 + workers :]


class Rewinds:
    """Data that is its own iterator: ``iter`` starts it again."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return self.at


def test_data_that_is_its_own_iterator_is_started_once_a_pass() -> None:
    _, loader = prepared(Rewinds())
    for _ in range(2):
        # islice: at the first window already the data would start again for ever
        assert list(itertools.islice(loader, 12)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("kind", "at"), [(DataLoader, 4), (torchdatas, 7)])
def test_another_number_of_workers_is_counted(kind: Any, at: int) -> None:
    _, loader = prepared(kind(Stateful(), batch_size=3, num_workers=2))
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    loader.close()
    _, other = prepared(kind(Stateful(), batch_size=3))
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match=f"other numbers of workers or ranks.*{at} batches"):
        assert bare(other) == bare(kind(Stateful(), batch_size=3))[at:]


def started(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.offset = 1000 * (worker + 1)  # the example of torch's documentation


class Offset(Stateful):
    offset = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number + self.offset


def doubled(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_the_users_worker_functions_work(persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        options = {"worker_init_fn": started, "collate_fn": doubled, "persistent_workers": persistent}
        return DataLoader(Offset(13), batch_size=2, num_workers=2, **options)  # type: ignore[arg-type]

    whole = bare(make())
    _, loader = prepared(make())
    batches = iter(loader)
    found = [next(batches).tolist() for _ in range(3)]
    assert found == whole[:3]
    state = loader.state_dict()
    loader.close()
    _, other = prepared(make())
    other.load_state_dict(state)
    assert bare(other) == whole[3:]
    # Worker 0 continued as worker 1; in the next epoch, which persistent workers get, each is itself again.
    assert bare(other) == [[n + 200 for n in batch] for batch in whole]
    other.close()


def test_a_spawned_worker_goes_on() -> None:
    def make(context: str) -> DataLoader[Any]:
        options: Any = {"worker_init_fn": started, "collate_fn": doubled, "multiprocessing_context": context}
        return DataLoader(Offset(5), batch_size=2, num_workers=1, **options)

    whole = bare(make("fork"))
    _, loader = prepared(make("fork"))
    batches = iter(loader)
    next(batches)
    _, other = prepared(make("spawn"))
    other.load_state_dict(loader.state_dict())
    assert bare(other) == whole[1:]


def test_persistent_workers_are_kept() -> None:
    class Processes(Numbers):
        def __iter__(self) -> Iterator[int]:
            return iter([os.getpid()])

    _, loader = prepared(DataLoader(Processes(), num_workers=1, persistent_workers=True))
    assert bare(loader) == bare(loader)
    loader.close()


class Own(DataLoader[int]):
    """Iterates in a way of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + 1


def test_which_data_is_read_how() -> None:
    assert type(reader_for(DataLoader(Numbers()))) is InProcessReader
    assert type(reader_for(DataLoader(Numbers(), num_workers=1))) is WorkerReader
    for data in (Own(Numbers()), torchdatas(Numbers()), range(3), DataLoader(Numbers(), num_workers=1, in_order=False)):
        assert type(reader_for(data)) is StreamReader
    _, loader = prepared(Own(Numbers(3), num_workers=1))
    assert bare(loader) == [[1], [2], [3]]


def test_any_object_with_a_state() -> None:
    class Mine:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.at < 6:
                self.at += 1
                yield torch.tensor([self.at])
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    _, loader = prepared(Mine())
    batches = iter(loader)
    next(batches), next(batches)
    _, other = prepared(Mine())
    other.load_state_dict(loader.state_dict())
    assert bare(other) == [[3], [4], [5], [6]]


def test_left_early_no_worker_stays() -> None:
    before = set(active_children())
    _, loader = prepared(DataLoader(Stateful(), batch_size=3, num_workers=2))
    for _ in loader:
        assert set(active_children()) > before
        break
    assert set(active_children()) == before
    _, kept = prepared(torchdatas(Stateful(), batch_size=3, num_workers=1))
    for _ in kept:
        break
    kept.close()
    assert set(active_children()) == before


def test_a_limit_holds_after_a_resume() -> None:
    _, loader = prepared(DataLoader(Stateful(), batch_size=2))
    loader.limit = 4
    batches = iter(loader)
    next(batches)
    _, other = prepared(DataLoader(Stateful(), batch_size=2))
    other.limit = 4
    other.load_state_dict(loader.state_dict())
    assert bare(other) == [[2, 3], [4, 5], [6, 7]]


# -- torchdata's loader over data with indices --------------------------------------------------------------------------------------


class Indexed(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_with_indices(workers: int, shuffle: bool) -> None:
    options: Any = {"batch_size": 3, "shuffle": shuffle}
    _, plain = prepared(DataLoader(Indexed(), **options))
    expected = [bare(plain), bare(plain)]  # the order is the engine's, whoever made the loader
    _, loader = prepared(torchdatas(Indexed(), **options, num_workers=workers, persistent_workers=workers > 0))
    assert [bare(loader), bare(loader)] == expected
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    assert state == {"epoch": 2, "position": 9, "stream": None}
    loader.close()
    _, other = prepared(torchdatas(Indexed(), **options, num_workers=workers))
    other.load_state_dict(state)
    assert bare(other) == (bare(plain))[3:]
    other.close()


def test_a_state_that_was_loaded_too_early() -> None:
    loader = torchdatas(Indexed(), batch_size=3)
    batches = iter(loader)
    next(batches)
    other = torchdatas(Indexed(), batch_size=3)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"was called before the loader was prepared.*the prepared loader"):
        prepared(other)


def test_torchdatas_sampler_with_replacement_follows_the_engine() -> None:
    orders = []
    for _ in range(2):  # each sampler makes itself a generator of a random seed
        sampler = torchdata_sampler.RandomSampler(Indexed(), replacement=True, num_samples=40)
        orders.append(bare(prepared(torchdatas(Indexed(), batch_size=8, sampler=sampler))[1]))
    assert orders[0] == orders[1]
    own = torch.Generator().manual_seed(4)
    given_one = torchdatas(Indexed(), batch_size=22, shuffle=True, generator=own)
    assert bare(prepared(given_one)[1]) == bare(prepared(DataLoader(Indexed(), 22, shuffle=True, generator=own))[1])


# -- several ranks ------------------------------------------------------------------------------------------------------------------


class Divided(Stateful):
    presharded = True

    def __init__(self, rank: int) -> None:
        super().__init__(7 if rank == 0 else 3)


def loaders(rank: int) -> dict[str, Any]:
    return {
        "in process": DataLoader(Stateful(), batch_size=2),
        "workers": DataLoader(Stateful(), batch_size=2, num_workers=2),
        "torchdata": torchdatas(Stateful(), batch_size=2),
        "presharded": DataLoader(Divided(rank), batch_size=2),
    }


def given(engine: Engine, loader: Any, most: int | None = None) -> tuple[list[Any], Any]:
    found: list[Any] = []
    for batch in loader:
        found.append(batch.tolist() if engine.window.share.size else None)
        if len(found) == most:
            state = loader.state_dict()
            loader.close()
            return found, state
    return found, loader.state_dict()


def two_saves() -> dict[str, Any]:
    engine = Engine(accelerator="cpu", seed=3)
    return {name: given(engine, engine.prepare(data), 2) for name, data in loaders(engine.process_index).items()}


class Shuffled(IterableDataset[int]):
    """Shuffles by its process's random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


def two_shuffles() -> list[Any]:
    engine = Engine(accelerator="cpu", seed=3)
    torch.manual_seed(engine.process_index)
    return bare(engine.prepare(DataLoader(Shuffled(), batch_size=2, num_workers=1)))


def two_goes_on() -> dict[str, Any]:
    """From this world size's state, and from that of one process after three batches."""
    engine = Engine(accelerator="cpu", seed=3)
    found = {}
    for name, data in loaders(engine.process_index).items():
        _, state = given(engine, engine.prepare(data), 2)
        other = engine.prepare(loaders(engine.process_index)[name])
        other.load_state_dict(state)
        found[name] = given(engine, other)[0]
    for name, state in json.loads(os.environ.get("STATES", "{}")).items():
        other = engine.prepare(loaders(engine.process_index)[name])
        other.load_state_dict(state)
        found[f"{name}, from one"] = given(engine, other)[0]
    return found


class Read(IterableDataset[Any]):
    """A stream of these samples."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Common(Read):
    presharded = False


class ShuffledLate(IterableDataset[int]):
    """Shuffles by its process's random numbers when its first sample is read."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()


class SeedsItself(IterableDataset[int]):
    """Seeds the process's numbers by rank, as the user's own code may do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        torch.manual_seed(100 + self.rank)
        yield from torch.randperm(20).tolist()


class Graph:
    """A batch of a class of one's own."""

    def __init__(self, samples: Any) -> None:
        self.nodes = torch.stack(samples)
        self.batch_size = len(samples)


class MayAugment(IterableDataset[Any]):
    """Draws the process's numbers for each sample, and changes those of the second half by them."""

    def __iter__(self) -> Iterator[Any]:
        for n in range(20):
            noise = torch.rand(())
            yield n + (noise if n >= 10 else 0 * noise)


def unlike(rank: int) -> dict[str, Any]:
    """Streams that are not the same on two ranks; each is trained in windows of two batches."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(rank)).tolist()
    tenth = [torch.tensor([0.1 * n]) * (1 + 1e-6 * rank) for n in range(20)]
    noisy = [torch.tensor([n + 0.1 * rank]) for n in range(20)]
    late = [*range(100, 110), *order[:10]]  # the first two and a half of five windows are alike
    wide = [torch.nn.functional.pad(torch.full((1, 60), 1.0 * n), (30, 900)).expand(3, -1) for n in late]
    return {
        "a half, begun alike": DataLoader(Read(range(40 if rank == 0 else 20)), batch_size=2),
        "a half, with workers": DataLoader(Read(range(40 if rank == 0 else 20)), batch_size=2, num_workers=1),
        "one more sample": DataLoader(Read(range(17 + rank)), batch_size=1),
        "nothing on rank 1": [[1], [2]] if rank == 0 else [],
        "another seed": DataLoader(Read(order), batch_size=2),
        "another seed, with workers": DataLoader(Read(order), batch_size=2, num_workers=1),
        "divided, not declared": DataLoader(Read(range(rank, 40, 2)), batch_size=2),
        "numbers and texts": Read([{"x": 3, "text": f"document {n + rank}"} for n in range(8)]),
        "seeds the process": DataLoader(SeedsItself(rank), batch_size=2),
        "a member": CombinedLoader([DataLoader(Read(order), batch_size=2), DataLoader(range(20), batch_size=2)]),
        "other samples later": DataLoader(Read(late), batch_size=1),
        "other samples later, with workers": DataLoader(Read(late), batch_size=1, num_workers=1),
        "other texts later": [{"text": 200 * "long " + str(n)} for n in late],
        "other parts of wide tensors": [tensor.unsqueeze(0).expand(4, -1, -1) for tensor in wide],
        "other arrays later": [{"x": numpy.full((64, 64), n)} for n in late],
        "another object": DataLoader(Read([torch.tensor([n]) for n in late]), batch_size=1, collate_fn=Graph),
        "a shorter last batch": DataLoader(Read(range(20 - rank)), batch_size=2),
        "a shorter last batch, rounded": DataLoader(Read(tenth[: 20 - rank]), batch_size=2),
        "augmented late": DataLoader(MayAugment(), batch_size=1),
        "shuffled by the process's numbers": DataLoader(ShuffledLate(), batch_size=2),
        "rounded in another way": DataLoader(Read(tenth), batch_size=2),
        "augmented, declared": DataLoader(Common(noisy), batch_size=2),
    }


def two_differ() -> dict[str, Any]:
    engine = Engine(accelerator="cpu", seed=3, accumulate_grad_batches=2)
    torch.manual_seed(engine.process_index)
    ends = {}
    for name, data in unlike(engine.process_index).items():
        data = iter(data) if isinstance(data, list) else data
        loader, batches = engine.prepare_data_loader(data), 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for _ in loader:
                    batches += 1
                error = ""
            except ValueError as problem:
                error = str(problem)
        loader.close()
        ends[name] = [
            batches,
            error,
            [str(warning.message) for warning in caught if "than rank 0's" in str(warning.message)],
        ]
    return ends


def two_end_alike() -> list[Any]:
    """Equal streams with all kinds of last rounds and windows, each for two epochs."""
    found = []
    for samples, size, window, limit in itertools.product((1, 5, 8, 11), (1, 2), (1, 3), (None, 2)):
        engine = Engine(accelerator="cpu", seed=3, accumulate_grad_batches=window)
        loader = engine.prepare_data_loader(DataLoader(Read(range(samples)), batch_size=size))
        loader.limit = limit
        found += [given(engine, loader)[0] for _ in range(2)]
    return found


class Drawn(Dataset[Any]):
    """Its samples are random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64)


class DrawnStream(IterableDataset[Any]):
    presharded = True

    def __iter__(self) -> Iterator[Any]:
        yield from (Drawn()[0] for _ in range(4))


class Draws(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.tolist()
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_draw_in_workers() -> dict[str, Any]:
    """What loaders' workers draw, when all ranks have one seed, and this process's next random number."""
    engine, found = Engine(accelerator="cpu", seed=3), {}
    options: dict[str, dict[str, Any]] = {"workers": {}, "persistent": {"persistent_workers": True}}
    for name, more in options.items():
        torch.manual_seed(5)
        loader = engine.prepare(DataLoader(Drawn(), batch_size=2, num_workers=1, **more))
        found[name] = [sample for _ in range(2) for batch in loader for sample in batch.tolist()], torch.rand(()).item()
        loader.close()
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(1)
    found["a generator"] = (
        bare(engine.prepare(DataLoader(Drawn(), batch_size=2, num_workers=1, generator=generator))),
        0.0,
    )
    torch.manual_seed(5)
    found["divided stream"] = bare(engine.prepare(DataLoader(DrawnStream(), batch_size=2, num_workers=1))), 0.0
    module, generator = Draws(), torch.Generator().manual_seed(1)
    fit = Fit(accelerator="cpu", max_epochs=1, seed=5, log_every_n_steps=0)
    fit.run(module, DataLoader(Drawn(), batch_size=2, num_workers=1, generator=generator))
    found["Fit, a generator"] = module.seen, 0.0
    return found


def bare_draws(passes: int) -> tuple[list[Any], float]:
    torch.manual_seed(5)
    loader = DataLoader(Drawn(), batch_size=2, num_workers=1)
    return [sample for _ in range(passes) for batch in loader for sample in batch.tolist()], torch.rand(()).item()


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    alone = Engine(accelerator="cpu", seed=3)
    states = {
        name: given(alone, alone.prepare(data), 3)[1] for name, data in loaders(0).items() if name != "presharded"
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATES", json.dumps(states))
        return ranks_of_file(__file__, 2, "two_")


SHARED = ["in process", "workers", "torchdata"]


@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_resume(two: dict[str, Any], name: str) -> None:
    whole = bare(loaders(0)[name])  # 12 batches
    saved = [rank[name] for rank in two["saves"]]
    assert [found for found, _ in saved] == [[whole[0], whole[2]], [whole[1], whole[3]]]
    assert saved[0][1]["position"] == 4
    assert saved[0][1] == saved[1][1]
    assert [rank[name] for rank in two["goes_on"]] == [whole[4::2], whole[5::2]]


def test_workers_of_all_ranks_shuffle_alike(two: dict[str, Any]) -> None:
    assert sorted(i for rank in two["shuffles"] for batch in rank for i in batch) == list(range(20))


@pytest.mark.parametrize("name", SHARED)
def test_another_world_size_sees_the_same_batches(two: dict[str, Any], name: str) -> None:
    whole = bare(loaders(0)[name])
    _, loader = prepared(loaders(0)[name])
    loader.load_state_dict(two["saves"][0][name][1])
    assert bare(loader) == whole[4:]
    rest = whole[3:]  # nine batches for two ranks: rank 1 repeats one at weight 0 at the end
    assert [rank[f"{name}, from one"] for rank in two["goes_on"]] == [rest[::2], [*rest[1::2], None]]


def test_divided_data_has_a_state_for_each_rank(two: dict[str, Any]) -> None:
    saved = [rank["presharded"] for rank in two["saves"]]
    assert [found for found, _ in saved] == [[[0, 1], [2, 3]], [[0, 1], [2]]]
    assert [state["position"] for _, state in saved] == [2, 2]
    assert [rank["presharded"] for rank in two["goes_on"]] == [[[4, 5], [6]], [None, None]]
    _, loader = prepared(loaders(0)["presharded"])
    loader.load_state_dict(saved[0][1])
    with pytest.warns(UserWarning, match="other numbers of workers or ranks"):
        assert bare(loader) == [[4, 5], [6]]


ENDS = {
    "a half, begun alike": (
        4,
        r"rank 1 epoch 0 ends after 10 batch\(es\), and rank 0 reads on.*the 2 step\(s\).*litData.*presharded = True",
    ),
    "a half, with workers": (4, r"rank 1 epoch 0 ends after 10 batch\(es\).*presharded = True"),
    "one more sample": (8, r"rank 0 epoch 0 ends after 17 batch\(es\), and rank 1 ends after 18.*the 4 step\(s\)"),
    "nothing on rank 1": (0, r"rank 1 epoch 0 ends after 0 batch\(es\)"),
    "another seed": (
        0,
        "the first batch of epoch 0 that rank 1 reads from DataLoader is another one than rank 0's.*presharded = True",
    ),
    "another seed, with workers": (0, "is another one than rank 0's.*with one seed"),
    "divided, not declared": (0, "is another one than rank 0's.*presharded = True"),
    "numbers and texts": (0, "rank 1 reads from Read is another one"),
    "seeds the process": (0, "is another one than rank 0's"),
    "a member": (0, "rank 1 reads from CombinedLoader is another one"),
    "other samples later": (
        4,
        "the batches 9 to 12 of epoch 0 that rank 1 reads from DataLoader are other ones than rank 0's.*trained twice",
    ),
    "other samples later, with workers": (4, "batches 9 to 12"),
    "other texts later": (4, "batches 9 to 12"),
    "other parts of wide tensors": (4, "batches 9 to 12"),
    "other arrays later": (4, "batches 9 to 12"),
    "another object": (4, "batches 9 to 12"),
    "a shorter last batch": (4, "batches 9 to 10"),
    "a shorter last batch, rounded": (4, "batches 9 to 10"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_stream_that_is_another_one_on_each_rank_is_an_error_on_all(two: dict[str, Any], name: str) -> None:
    batches, text = ENDS[name]
    errors = {rank[name][1] for rank in two["differ"]}
    assert len(errors) == 1
    assert re.search(text, *errors)
    assert [rank[name][0] for rank in two["differ"]] == [batches] * 2


@pytest.mark.parametrize(("name", "batches"), [("shuffled by the process's numbers", 5), ("augmented late", 10)])
def test_a_stream_that_draws_from_its_process_warns(two: dict[str, Any], name: str, batches: int) -> None:
    for rank in two["differ"]:
        *ends, said = rank[name]
        assert ends == [batches, ""]
        assert re.search(r"other ones? than rank 0's.*draws random numbers.*set_epoch.*presharded = False", *said)


@pytest.mark.parametrize("name", ["rounded in another way", "augmented, declared"])
def test_the_same_samples_with_other_bits_are_trained(two: dict[str, Any], name: str) -> None:
    assert [rank[name] for rank in two["differ"]] == [[5, "", []]] * 2


def test_equal_streams_end_together(two: dict[str, Any]) -> None:
    cases = itertools.product((1, 5, 8, 11), (1, 2), (1, 3), (None, 2))
    expected: list[list[Any]] = [[], []]
    for samples, size, _, limit in cases:
        batches = bare(DataLoader(Read(range(samples)), batch_size=size))[: None if limit is None else 2 * limit]
        padded = [*batches, None] if len(batches) % 2 else batches
        for rank in range(2):
            expected[rank] += [padded[rank::2]] * 2
    assert two["end_alike"] == expected


@pytest.mark.parametrize("name", ["workers", "persistent", "a generator", "divided stream", "Fit, a generator"])
def test_workers_draw_other_numbers_on_each_rank(two: dict[str, Any], name: str) -> None:
    (first, after), (second, after_second) = (rank[name] for rank in two["draw_in_workers"])
    numbers = [set(torch.tensor(samples, dtype=torch.float64).flatten().tolist()) for samples in (first, second)]
    assert numbers[0] & numbers[1] == set()
    assert after == after_second


def test_rank_0s_workers_draw_as_before(two: dict[str, Any]) -> None:
    samples, after = bare_draws(2)
    found, found_after = two["draw_in_workers"][0]["workers"]
    assert (found[:4], found[4:], found_after) == (samples[:4], samples[8:12], after)


# -- how a stream is distributed; the group is a stand-in: feeds ask it for rank and world size ---------------------------------------------


@dataclass
class Stand:
    world_size: int = 1
    rank: int = 0


def feed(data: Any, world_size: int = 1, rank: int = 0) -> Any:
    return StreamFeed(data, Stand(world_size, rank), 0)  # type: ignore[arg-type]


def read(source: Any, epoch: int = 0, start: int = 0, window: int = 1, limit: int | None = None) -> list[list[int]]:
    """The samples of each micro-batch that counts."""
    return [batch.tolist() for batch, share in source.micro_batches(epoch, start, window, limit) if share.size]


class Flow(IterableDataset[int]):
    def __init__(self, count: int, presharded: bool = False) -> None:
        self.count, self.presharded, self.epochs = count, presharded, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def test_a_stream_is_read_in_windows() -> None:
    source = feed(DataLoader(Flow(7), batch_size=2))
    found = [
        (batch.tolist(), round(1 / share.divisor, 6), share.last)
        for batch, share in source.micro_batches(0, 0, 3, None)
    ]
    assert found == [([0, 1], 0.333333, False), ([2, 3], 0.333333, False), ([4, 5], 0.333333, True), ([6], 1.0, True)]


def test_a_stream_is_told_its_epoch() -> None:
    data = Flow(2)
    read(feed(DataLoader(data)), epoch=3)
    assert data.epochs == [3]


def test_a_streams_middle_is_reached_by_reading() -> None:
    source = feed(DataLoader(Flow(8), batch_size=2))
    with pytest.warns(UserWarning, match="2 batches are read and discarded"):
        assert read(source, start=2) == [[4, 5], [6, 7]]
    assert read(source, limit=3, window=2) == [[0, 1], [2, 3], [4, 5]]


def test_a_streams_length() -> None:
    assert feed(DataLoader(Flow(8))).length(None) is None
    assert feed(range(5)).length(None) == 5
    assert feed(range(5), 2, 0).length(None) == 3
    assert feed(range(5), 2, 0).length(2) == 2

    class Divided(list[int]):
        presharded = True

        def __init__(self) -> None:
            super().__init__(range(5))

    assert feed(Divided(), 2, 1).length(None) == 5
