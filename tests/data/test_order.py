"""The order of an epoch: a user's sampler decides it, a shuffle follows from seed and epoch. Only torch's own plain classes are replaced.

Expected orders are what the samplers say when they are read in a bare loop, or written down by hand.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.internals import forget_warnings, new_deal
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    random_split,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from callbacks import ModelCheckpoint
from engine import CombinedLoader, Engine, Fit, Mixture, Packed, TokenBudget, TrainModule
from engine.data.order import FeistelIndices, mixed, permutation
from engine.utils.errors import CheckError


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
    return Engine(**{"accelerator": "cpu", "seed": 3, **settings}).prepare_data_loader(data)


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
    monkeypatch.setattr("engine.data.order._ENDLESS", 1000)
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


@pytest.mark.parametrize("entry", [int, np.int64, np.int32, torch.tensor, str, float])
def test_entries_of_any_type_come_as_they_are(entry: Any) -> None:
    """The dataset gets what the sampler has yielded, of the same type, before and after a resume."""
    expected = [entry(number) for number in ((7919 * number) % 5000 for number in range(5000))]

    class Entries(Dataset[Any]):
        def __len__(self) -> int:
            return 5000

        def __getitem__(self, index: Any) -> Any:
            return [index]

    def make() -> Any:
        return prepared(DataLoader(Entries(), batch_size=100, sampler=expected, collate_fn=sum_of_lists))

    first = make()
    batches = iter(first)
    read_first = [index for _ in range(20) for index in next(batches)]
    state = first.state_dict()
    del batches
    second = make()
    second.load_state_dict(state)
    everything = read_first + [index for batch in second for index in batch]
    assert everything == expected
    assert set(map(type, everything)) == {type(expected[0])}


def test_the_order_of_a_users_sampler_takes_eight_bytes_a_sample() -> None:
    class Strides(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return ((7919 * number) % 100_000 for number in range(100_000))

        def __len__(self) -> int:
            return 100_000

    loader = loaded(Strides(), count=100_000)
    tracemalloc.start()
    assert next(iter(loader)).tolist() == [0, 7919, 15838, 23757]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 100_000  # a list takes 40; what is drawn at once is a list, too


def sum_of_lists(samples: list[list[Any]]) -> list[Any]:
    return [entry for sample in samples for entry in sample]


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
    with pytest.warns(UserWarning, match="Unseeded yields a different order after resuming, in epoch 0"):
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


def parts_of(seed: int) -> Any:
    return random_split(Numbers(), [12, 8], generator=torch.Generator().manual_seed(seed))[0]  # type: ignore[arg-type]


class Files(Numbers):
    """A dataset with a list of files."""

    def __init__(self, files: list[str]) -> None:
        super().__init__(len(files))
        self.files = [(file, 1) for file in files]


UNLIKE: dict[str, tuple[Callable[[int], Any], str]] = {
    "batch sizes": (lambda r: DataLoader(Numbers(), 4 + r), "batch_size: rank 0 has 4, rank 1 has 5"),
    "last batches": (
        lambda r: DataLoader(Numbers(), 3, drop_last=r == 1),
        "drop_last: rank 0 has False, rank 1 has True",
    ),
    "shuffles": (
        lambda r: DataLoader(Numbers(), 4, shuffle=r == 1),
        "order: rank 0 has as in the data, rank 1 has shuffled",
    ),
    "kinds": (
        lambda r: [[0]] if r else DataLoader(Numbers()),
        "kind: rank 0 has map-style dataset, rank 1 has list of 1 batches",
    ),
    "lists": (lambda r: [[0]] * (4 + r), "kind: rank 0 has list of 4 batches, rank 1 has list of 5 batches"),
    "random splits": (lambda r: DataLoader(parts_of(r), 4), "choice of samples"),
    "splits inside": (lambda r: DataLoader(ConcatDataset([Numbers(), parts_of(r)]), 4), "choice of samples"),
    "rows": (lambda r: DataLoader(Packed([[1] * 4] * 8, 8 + r), 4), "tokens_per_sample: rank 0 has 8, rank 1 has 9"),
    "documents": (lambda r: DataLoader(Packed([[1] * (3 + r)] * 8, 8), 4), "packing"),
    "budgets": (
        lambda r: DataLoader(Numbers(), batch_sampler=TokenBudget([2] * 20, max_tokens=8 + 2 * r)),  # type: ignore[arg-type]
        "packing",
    ),
    "weights": (
        lambda r: DataLoader(Mixture({"a": Numbers(), "b": Numbers()}, {"a": 1, "b": 1 + r}), 4),
        "weights",
    ),
    "sizes": (
        lambda r: DataLoader(Mixture({"a": Numbers(), "b": Numbers(9 + r)}, "equal", samples=20), 4),
        "sizes of sources",
    ),
    "modes": (
        lambda r: CombinedLoader([DataLoader(Numbers()), DataLoader(Numbers())], ["min_size", "max_size"][r]),
        "mode: rank 0 has min_size, rank 1 has max_size",
    ),
    "names of members": (
        lambda r: CombinedLoader({"ab"[r]: DataLoader(Numbers())}),
        "members: rank 0 has {'a': 'loader'}, rank 1 has {'b': 'loader'}",
    ),
    "members": (
        lambda r: CombinedLoader([DataLoader(Numbers()), DataLoader(Numbers(), shuffle=r == 1)]),
        "order of loader 1: rank 0 has as in the data, rank 1 has shuffled",
    ),
}


def two_unlike() -> dict[str, str]:
    errors = {}
    for name, (make, _) in UNLIKE.items():
        with pytest.raises(CheckError) as error:
            prepared(make(rank()))
        errors[name] = str(error.value)
    return errors


def two_files() -> list[str]:
    said = []
    for names in (["a", "b"], ["b", "a"]), (["/0/a", "/0/b"], ["/1/a", "/1/b"]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read(prepared(DataLoader(Files(names[rank()]))))
        said.append("".join(str(warning.message) for warning in caught))
    return said


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


@pytest.mark.parametrize("name", UNLIKE)
def test_loaders_that_differ_by_rank_are_an_error(two: Any, name: str) -> None:
    assert two["unlike"][0][name] == two["unlike"][1][name]
    assert two["unlike"][0][name].startswith(f"the loaders differ between the ranks:\n  {UNLIKE[name][1]}")


def test_files_in_another_order_are_told_of(two: Any) -> None:
    """As ``os.listdir`` gives them on two machines; the folder may be another one."""
    for on_one_machine, in_other_folders in two["files"]:
        assert on_one_machine.startswith(
            "files of the dataset has other names, or another order of them, on rank 1 than on"
        )
        assert in_other_folders == ""


def test_a_counting_sampler_is_resumed_on_two_ranks(two: Any) -> None:
    assert two["counting"] == [[[4, 0], [3, 5, 1]], [[5, 1], [4, 0, 2]]]


# -- shuffles as functions of (seed, epoch) --------------------------------------------------------------------------------------------------


def test_order_is_a_function_of_seed_and_epoch() -> None:
    first = permutation(100, 7, 3)
    torch.manual_seed(1)
    assert torch.equal(first, permutation(100, 7, 3))
    assert first.sort().values.tolist() == list(range(100))
    assert not torch.equal(first, permutation(100, 7, 4))
    assert not torch.equal(first, permutation(100, 8, 3))


def test_drawing_leaves_torchs_random_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    permutation(100, 7, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_neighbouring_seeds_and_epochs_do_not_meet() -> None:
    found = {mixed(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(found) == 10_000
    assert all(0 <= value < 2**63 for value in found)


def test_splitmix() -> None:
    # The finalizer of Steele, Lea and Flood (2014): its published first output for seed 0 is 0xE220A8397B1DCDAF, at z = 0x9E3779B97F4A7C15.
    seed = (0x9E3779B97F4A7C15 - 0x2545F4914F6CDD1D) * pow(0x9E3779B97F4A7C15, -1, 1 << 64) % (1 << 64)
    assert mixed(seed, 0) == 0xE220A8397B1DCDAF >> 1


# -- shuffles that are computed: a bijection for every size, spread evenly, the same wherever they are entered, at no cost for any size --------

WRITTEN_DOWN = [2345913078, 9916892431, 2344231012]
SMALL = [*range(18), 63, 64, 65, 1000, 4097, 65537]


@pytest.mark.parametrize("seed", [0, 12345])
def test_every_number_comes_once(seed: int) -> None:
    for size in SMALL:
        assert sorted(FeistelIndices(size, seed, 2)[:]) == list(range(size))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(FeistelIndices(40, seed, epoch)[:]) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert FeistelIndices(40, 3, 4)[:] == FeistelIndices(40, 3, 4)[:]


def test_the_numbers_of_today_are_those_of_tomorrow() -> None:
    """A checkpoint's order must not change with a version or a platform: written down when it was made, and computed again by hand below."""
    for size in (1000, 2**24 + 3, 10**10):
        assert FeistelIndices(size, 7, 1)[:5] == by_python(size, 7, 1, 5)
    assert FeistelIndices(10**10, 7, 1)[:3] == WRITTEN_DOWN


def by_python(size: int, seed: int, epoch: int, count: int) -> list[int]:
    """The same network with Python's integers."""

    def mix(a: int, b: int) -> int:
        z = (a * 0x9E3779B97F4A7C15 + b * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) >> 1

    def scramble(half: int, key: int) -> int:
        x = half ^ key
        x = (x ^ x >> 15) * 0x2C1B3C6D % 2**32
        x = (x ^ x >> 12) * 0x297A2D39
        return x ^ x >> 15

    bits = (size - 1).bit_length()
    low_bits, keys = bits // 2, [mix(mix(seed, epoch), i) % 2**32 for i in range(8 if bits >= 16 else 16)]

    def once(number: int) -> int:
        high, low = number >> low_bits, number % 2**low_bits
        for i, key in enumerate(keys):
            if i % 2:
                low ^= scramble(high, key) % 2**low_bits
            else:
                high ^= scramble(low, key) % 2 ** (bits - low_bits)
        return (high << low_bits) + low

    found = []
    for place in range(count):
        number = once(place)
        while number >= size:
            number = once(number)
        found.append(number)
    return found


@pytest.mark.parametrize(("size", "seeds", "bound"), [(4, 480, 55.0), (5, 1200, 185.0)])
def test_all_permutations_are_equally_likely(size: int, seeds: int, bound: float) -> None:
    """Chi-square over the 24 or 120 permutations: means of 23 and 119, deviations of 6.8 and 15.4; the bounds are 4 deviations away and more."""
    counts = Counter(tuple(FeistelIndices(size, seed, 0)[:]) for seed in range(seeds))
    every = list(itertools.permutations(range(size)))
    expected = seeds / len(every)
    assert sum((counts[each] - expected) ** 2 / expected for each in every) < bound


def test_places_and_neighbours_of_a_large_one_are_even() -> None:
    """2**16 entries of a permutation of 2**24 + 5 numbers: 256 classes of values, and of differences of neighbours.

    Chi-square with 255 degrees of freedom: mean 255, deviation 22.6; from 150 to 360 are more than 4.5 deviations.
    """
    size = 2**24 + 5
    for seed, start in ((1, 0), (2, 2**23), (3, size - 2**16)):
        values = FeistelIndices(size, seed, 0).entries_at(torch.arange(start, start + 2**16))
        for numbers in (values, (values[1:] - values[:-1]) % size, (values[1::2] ^ values[::2]) % 2**24):
            counts = torch.bincount(numbers * 256 // size if int(numbers.max()) < size else numbers, minlength=256)[
                :256
            ].double()
            expected = len(numbers) / 256
            assert 150 < ((counts - expected) ** 2 / expected).sum() < 360


def test_slices_and_pieces_are_the_same_entries() -> None:
    order = FeistelIndices(2**24 + 1, 5, 3)
    whole = order[100:2148]
    assert [order[i] for i in (100, 117, 2147)] == [whole[0], whole[17], whole[2047]]
    assert order[-1] == order[2**24]
    deal = new_deal(len(order), 16, 2, 2, 1)
    pieces = list(itertools.islice(order.pieces(deal.windows(64)), 300))
    expected = [order[low : low + 16] for low in itertools.islice(itertools.count(64 + 16, 32), 300)]
    assert pieces == expected
    short = new_deal(9, 4, 1, 2, 0)
    assert list(FeistelIndices(9, 1, 1).pieces(short.windows())) == [
        FeistelIndices(9, 1, 1)[0:4],
        FeistelIndices(9, 1, 1)[8:9],
    ]


@pytest.mark.parametrize(("size", "count"), [(-1, None), (2**62 + 1, None), (5, 6)])
def test_impossible_sizes(size: int, count: int | None) -> None:
    with pytest.raises(ValueError, match=f"a permutation of {size} numbers"):
        FeistelIndices(size, 0, 0, count)


class Huge(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        return index


def shuffled(size: int, seed: int = 7, **options: Any) -> Any:
    return Engine(accelerator="cpu", seed=seed).prepare_data_loader(
        DataLoader(Huge(size), **{"batch_size": 4, "shuffle": True, **options})
    )


def test_ten_billion_samples_cost_nothing() -> None:
    tracemalloc.start()
    loader = shuffled(10**10)
    first = next(iter(loader)).tolist()
    loader.resume(3, 10**10 - 8)
    last = [batch.tolist() for batch in loader]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first == by_python(10**10, 7, 0, 4)
    assert [i for batch in last for i in batch] == FeistelIndices(10**10, 7, 3)[10**10 - 8 :]
    assert peak < 8 * 2**20
    assert len(loader) == 25 * 10**8


def test_a_few_samples_of_many() -> None:
    loader = shuffled(10**10, sampler=RandomSampler(Huge(10**10), num_samples=10), shuffle=None)
    found = [i for batch in loader for i in batch.tolist()]
    assert found == by_python(10**10, 7, 0, 10)


def test_a_few_of_many_without_batching() -> None:
    assert [int(i) for i in itertools.islice(shuffled(10**10, batch_size=None), 3)] == by_python(10**10, 7, 0, 3)


def test_a_resume_continues_the_kind_of_order_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = permutation(100, 7, 0).tolist()
    before = shuffled(100)
    assert flat(before) == stored  # below the size nothing has changed
    before.resume(0, 8)
    state = before.state_dict()
    assert "order" not in state  # as it was saved when there was no other order
    monkeypatch.setattr("engine.data.loader.LARGE", 100)
    computed = shuffled(100)
    assert flat(computed) == FeistelIndices(100, 7, 0)[:]
    computed.resume(0, 8)
    assert computed.state_dict()["order"] == "feistel from 100"
    old, new = shuffled(100), shuffled(100)
    old.load_state_dict(state)
    new.load_state_dict(computed.state_dict())
    assert flat(old) == stored[8:]
    assert flat(old) == permutation(100, 7, 1).tolist()  # for the rest of the run
    assert flat(new) == FeistelIndices(100, 7, 0)[8:]
    assert "order" not in old.state_dict()
    for kind in ("other", "feistel from here", "feistel before 5"):
        with pytest.raises(ValueError, match=f"unknown kind '{kind}'"):
            new.load_state_dict({**state, "order": kind})


@pytest.mark.parametrize("kind", [None, "feistel"])
def test_orders_of_checkpoints_from_before_shuffles_were_computed_from_fewer_samples_on(kind: str | None) -> None:
    """Then shuffles were computed from 2**24 samples on. One text stood for all members of a combination: ``"feistel"``, if one was that large."""
    sizes = [2**22 + 2] if kind is None else [2**22 + 2, 2**24 + 5]
    stored = permutation(sizes[0], mixed(7, 1), 0)[40:44].tolist()

    def combined() -> Any:
        members = [DataLoader(Huge(size), batch_size=4, shuffle=True) for size in sizes]
        return prepared(CombinedLoader(members), seed=7)

    fresh = combined()
    fresh.resume(0, 10)
    assert next(iter(fresh))[0].tolist() == FeistelIndices(sizes[0], mixed(7, 1), 0)[40:44]
    assert fresh.state_dict()["order"] == f"feistel from {2**22}"
    old = {"epoch": 0, "position": 10, "stream": None, **({} if kind is None else {"order": kind})}
    resumed = combined()
    resumed.load_state_dict(old)
    assert next(iter(resumed))[0].tolist() == stored
    if kind is not None:
        assert next(iter(resumed))[1].tolist() == FeistelIndices(sizes[1], mixed(7, 2), 1)[:4]
    assert resumed.state_dict().get("order") == kind  # the rest of the run, too
    again = combined()
    again.load_state_dict({**resumed.state_dict(), "epoch": 0, "position": 10})
    assert next(iter(again.skipping(0)))[0].tolist() == stored


# -- data that orders itself ----------------------------------------------------------------------------------------------------------


class Turns(Dataset[int]):
    """Ten draws an epoch; draw ``k`` is ``100 * seed + k``, or ``k`` without a shuffle."""

    def __init__(self, base: int = 0) -> None:
        self.base = base

    def __len__(self) -> int:
        return 10

    def __getitem__(self, draw: int) -> int:
        return self.base + draw

    def seeded(self, seed: int, shuffle: bool) -> Turns:
        return Turns(100 * seed if shuffle else 0)

    def draws(self, epoch: int) -> range:
        return range(10 * epoch, 10 * epoch + 10)


class Pairs:
    """A batch sampler: pairs of indices, in another order in each epoch."""

    def __init__(self, first: int = -1) -> None:
        self.first = first

    def __len__(self) -> int:
        return 4

    def seeded(self, seed: int, shuffle: bool) -> Pairs:
        assert shuffle
        return Pairs(seed)

    def draws(self, epoch: int) -> list[list[int]]:
        return [[(self.first + epoch + 2 * i) % 8, (self.first + epoch + 2 * i + 1) % 8] for i in range(4)]


def test_a_dataset_that_orders_itself_gives_its_draws_one_after_the_other_across_epochs() -> None:
    data = Turns()
    loader = prepared(DataLoader(data, batch_size=5, shuffle=True))
    assert [flat(loader) for _ in range(3)] == [list(range(300 + 10 * e, 310 + 10 * e)) for e in range(3)]
    assert flat(prepared(DataLoader(data, batch_size=5))) == list(range(10))
    loader.resume(2, 5)
    assert flat(loader) == list(range(325, 330))
    assert data.base == 0  # the user's object has not changed
    generator = torch.Generator().manual_seed(8)
    assert flat(prepared(DataLoader(data, shuffle=True, generator=generator))) == list(range(800, 810))
    divided = DistributedSampler(data, 1, 0, seed=4)
    assert flat(prepared(DataLoader(data, sampler=divided))) == list(range(400, 410))


def test_a_batch_sampler_that_orders_itself_gives_the_batches_of_each_epoch() -> None:
    loader = prepared(DataLoader(Numbers(8), batch_sampler=Pairs()))
    assert [read(loader), read(loader)] == [[[3, 4], [5, 6], [7, 0], [1, 2]], [[4, 5], [6, 7], [0, 1], [2, 3]]]
    assert len(loader) == loader.samples == 4
    loader.resume(1, 2)
    assert read(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "sampler",
    [[3, 1], RandomSampler(Turns(), num_samples=4), RandomSampler(Turns(), replacement=True), Backwards(Turns())],
)
def test_another_order_of_a_dataset_that_orders_itself_is_refused(sampler: Any) -> None:
    with pytest.raises(ValueError, match=r"Turns decides itself .* leave the sampler out"):
        prepared(DataLoader(Turns(), sampler=sampler))


def test_a_dataset_that_orders_itself_is_not_divided_already() -> None:
    data = Turns()
    data.presharded = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="declared as divided already"):
        prepared(DataLoader(data))
