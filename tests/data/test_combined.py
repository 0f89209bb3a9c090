"""Loaders read together: expected batches come from bare loops over plain loaders, zipped, chained and cycled by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.internals import new_deal
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from engine import CombinedLoader, Engine, Fit, TrainModule
from engine.data.combined import _rank_numbers


class Numbers(Dataset[int]):
    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first, self.read = count, first, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return self.first + index


class Flow(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count, self.at, self.loaded, self.read = count, 0, False, 0

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        return self.going_on()

    def going_on(self) -> Iterator[int]:
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield 999 + self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loaded = state["at"], True


def prepared(data: Any, **settings: Any) -> tuple[Engine, Any]:
    engine = Engine(accelerator="cpu", seed=3, **settings)
    return engine, engine.prepare(data)


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain(value) for value in tree)
    return tree.tolist() if isinstance(tree, Tensor) else tree


def read(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def small(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(5), batch_size=2, **options)  # 3 batches, the last one short


def large(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(22, 100), batch_size=3, **options)  # 8 batches, the last one short


def stream() -> DataLoader[Any]:
    return DataLoader(Flow(9), batch_size=2)  # 5 batches


def by_hand(mode: str, first: list[Any], second: list[Any]) -> list[Any]:
    if mode == "sequential":
        return first + second
    if mode == "min_size":
        return [list(row) for row in zip(first, second, strict=False)]
    if mode == "max_size":
        return [list(row) for row in itertools.zip_longest(first, second)]
    length = max(len(first), len(second))
    return [[first[i % len(first)], second[i % len(second)]] for i in range(length)]


MODES = ["min_size", "max_size_cycle", "max_size", "sequential"]
PAIRS = {
    "indices": (small, large),
    "longer first": (large, small),
    "a stream": (small, stream),
    "streams": (stream, stream),
}
PAIRS |= {
    "a list": (lambda: [torch.tensor([7]), torch.tensor([8, 9])], large),
    "a list and a stream": (stream, lambda: [torch.tensor([7])]),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, pair: str) -> None:
    first, second = PAIRS[pair]
    expected = by_hand(mode, read(first()), read(second()))
    assert read(CombinedLoader([first(), second()], mode)) == expected  # without an engine
    _, loader = prepared(CombinedLoader([first(), second()], mode))
    assert read(loader) == expected
    assert read(loader) == expected  # nothing is shuffled
    if "stream" not in pair:
        assert len(loader) == len(CombinedLoader([first(), second()], mode)) == len(expected)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [1, 2])
def test_resume_in_the_middle(mode: str, pair: str, window: int) -> None:
    first, second = PAIRS[pair]
    _, loader = prepared(CombinedLoader([first(), second()], mode), accumulate_grad_batches=window)
    whole = read(loader)
    for place in range(window, len(whole) + window, window):
        _, loader = prepared(CombinedLoader([first(), second()], mode), accumulate_grad_batches=window)
        found = []
        for batch in loader:
            found.append(plain(batch))
            if len(found) == min(place, len(whole)):
                break
        state = loader.state_dict()
        assert state["position"] == place
        _, other = prepared(CombinedLoader([first(), second()], mode), accumulate_grad_batches=window)
        other.load_state_dict(state)
        assert found + read(other) == whole


@pytest.mark.parametrize("mode", MODES)
def test_a_resume_reads_nothing_again(mode: str) -> None:
    first, second = Numbers(1000), Numbers(1000)
    _, loader = prepared(CombinedLoader([DataLoader(first, 2), DataLoader(second, 2)], mode))
    loader.resume(0, 300)
    batch = next(iter(loader))
    assert plain(batch) == ([600, 601] if mode == "sequential" else [[600, 601], [600, 601]])
    assert (first.read, second.read) == (2, 0 if mode == "sequential" else 2)


def test_a_streams_resume_reads_nothing_again() -> None:
    flow, numbers = Flow(1000), Numbers(1000)

    def make() -> Any:
        return prepared(CombinedLoader([DataLoader(flow, 2), DataLoader(numbers, 2)]))[1]

    loader = make()
    batches = iter(loader)
    for _ in range(300):
        next(batches)
    state = loader.state_dict()
    flow.read = numbers.read = 0
    other = make()
    other.load_state_dict(state)
    assert plain(next(iter(other))) == [[1600, 1601], [600, 601]]
    assert (flow.read, numbers.read) == (2, 2)


@pytest.mark.parametrize("stateless", [False, True])
def test_a_stream_that_has_run_out_is_not_asked_again(stateless: bool) -> None:
    def make() -> Any:
        ended = (torch.tensor([i]) for i in range(2)) if stateless else DataLoader(Flow(4), 2)
        return prepared(CombinedLoader([ended, stream(), large()], "max_size"))[1]

    whole = read(make())
    assert [row[0] is None for row in whole] == [False] * 2 + [True] * 6
    loader, found = make(), []
    for count in (3, 1, 2, 2):  # resumed again and again, without a warning of counting
        batches = iter(loader)
        found += [plain(next(batches)) for _ in range(count)]
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
    assert found == whole
    assert read(loader) == []


def test_a_resumed_streams_state_before_its_first_window_is_over() -> None:
    def make() -> Any:
        return prepared(CombinedLoader([stream(), large()], "max_size"), accumulate_grad_batches=2)[1]

    loader = make()
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    for count in range(2):
        other = make()
        other.load_state_dict(state)
        batches = iter(other)
        for _ in range(count):
            next(batches)
        assert other.state_dict() == state


def test_an_old_pass_that_ends_late_leaves_the_new_one_alone() -> None:
    _, loader = prepared(CombinedLoader([stream(), small()]))
    old = iter(loader)
    next(old)
    new = iter(loader)
    first = plain(next(new))
    del old
    assert [first, *map(plain, new)] == by_hand("min_size", read(stream()), read(small()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", ["indices", "a stream"])
def test_resuming_takes_no_random_numbers(pair: str, mode: str) -> None:
    def make() -> Any:
        return prepared(CombinedLoader([PAIRS[pair][0](), PAIRS[pair][1]()], mode))[1]

    loader = make()
    torch.manual_seed(1)
    batches = iter(loader)
    next(batches)
    state, before = loader.state_dict(), torch.get_rng_state()
    other = make()
    other.load_state_dict(state)
    next(iter(other))
    assert torch.equal(before, torch.get_rng_state())
    # As a bare loop takes them: one for each loader that is begun.
    torch.manual_seed(1)
    rest = [iter(one()) for one in PAIRS[pair][: 1 if mode == "sequential" else 2]]
    assert rest
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("pair", ["indices", "a stream"])
def test_a_resume_at_a_later_members_start_draws_as_the_whole_pass_does(pair: str) -> None:
    def make() -> Any:
        return prepared(CombinedLoader([small(), PAIRS[pair][1]()], "sequential"))[1]

    loader = make()
    batches = iter(loader)
    for _ in range(3):  # all of the first member
        next(batches)
    state, before = loader.state_dict(), torch.get_rng_state()
    next(batches)
    after = torch.get_rng_state()
    other = make()
    other.load_state_dict(state)
    torch.set_rng_state(before)
    next(iter(other))
    assert torch.equal(after, torch.get_rng_state())


def test_with_a_stream_cycles_are_shuffled_anew_too() -> None:
    _, loader = prepared(
        CombinedLoader([DataLoader(Numbers(6), 6, shuffle=True), DataLoader(Flow(6), 2)], "max_size_cycle")
    )
    found = [row[0] for row in read(loader)]
    assert [sorted(batch) for batch in found] == [list(range(6))] * 3
    assert len({tuple(batch) for batch in found}) == 3


def test_few_passes_orders_are_kept() -> None:
    _, loader = prepared(
        CombinedLoader([DataLoader(Numbers(3), 3, shuffle=True), DataLoader(Numbers(50), 1)], "max_size_cycle")
    )
    assert len(read(loader)) == 50
    feed: Any = loader._feed
    assert len(feed.members[0].passes) <= 3


def test_numbers_of_a_late_member_are_found_at_once() -> None:
    units = 10**12
    assert list(_rank_numbers(new_deal(units, 1, window=3), 0, units - 3, units)) == list(range(units - 3, units))
    assert list(_rank_numbers(new_deal(units, 1, window=2, world_size=2, rank=1), 4, units // 2, units // 2 + 5)) == [
        units // 2 + 1,
        units // 2 + 3,
    ]
    assert list(_rank_numbers(new_deal(11, 1, window=2, world_size=2, rank=1), 0, 2, 11)) == [
        3,
        5,
        7,
        9,
        8,
    ]  # the last a repetition, rank 0's 8


def test_cycles_are_shuffled_anew_and_members_apart() -> None:
    members = {"a": DataLoader(Numbers(6), 2, shuffle=True), "b": DataLoader(Numbers(18), 2, shuffle=True)}
    _, loader = prepared(CombinedLoader(members, "max_size_cycle"))
    found = read(loader)
    passes = [[i for batch in found[k : k + 3] for i in batch["a"]] for k in (0, 3, 6)]
    assert [sorted(one) for one in passes] == [list(range(6))] * 3
    assert len({tuple(one) for one in passes}) == 3
    assert sorted(i for batch in found for i in batch["b"]) == list(range(18))
    assert read(loader) != found
    _, same = prepared(
        CombinedLoader([DataLoader(Numbers(18), 18, shuffle=True), DataLoader(Numbers(18), 18, shuffle=True)])
    )
    ((one, two),) = read(same)
    assert one != two


@pytest.mark.parametrize("members", [["shuffled", "weighted"], ["weighted", "shuffled", "stream"]])
def test_resume_inside_a_cycle_of_drawn_orders(members: list[str]) -> None:
    def weighted() -> Any:
        return WeightedRandomSampler([1, 2, 3, 4, 5], 5, generator=torch.Generator().manual_seed(4))

    def make() -> Any:
        kinds = {
            "shuffled": lambda: DataLoader(Numbers(13), 2, shuffle=True),
            "weighted": lambda: DataLoader(Numbers(5), 2, sampler=weighted()),
            "stream": lambda: DataLoader(Flow(20), 2),
        }
        return prepared(CombinedLoader([kinds[name]() for name in members], "max_size_cycle"))[1]

    loader = make()
    read(loader)
    whole = read(loader)
    for place in range(1, len(whole)):
        other = make()
        other.set_epoch(1)
        batches = iter(other)
        found = [plain(next(batches)) for _ in range(place)]
        state = other.state_dict()
        last = make()
        last.load_state_dict(state)
        assert found + read(last) == whole


def test_workers_keep_the_order() -> None:
    loaders = [small(num_workers=1, persistent_workers=True), large(num_workers=1)]
    _, loader = prepared(CombinedLoader(loaders, "max_size_cycle"))
    expected = by_hand("max_size_cycle", read(small()), read(large()))
    assert read(loader) == expected
    loader.resume(1, 4)
    assert read(loader) == expected[4:]
    loader.close()


def test_a_member_after_another_starts_late() -> None:
    """Sequential members' workers are started when their turn comes."""
    _, loader = prepared(CombinedLoader([small(), large(num_workers=1)], "sequential"))
    batches = iter(loader)
    next(batches)
    feed: Any = loader._feed
    assert [member.iterator is None for member in feed.feeds] == [False, True]
    batches.close()  # type: ignore[attr-defined]


def test_the_weight_is_the_number_of_samples_of_all() -> None:
    for pair in ((small, large), (small, stream)):
        engine, loader = prepared(CombinedLoader([pair[0](), pair[1]()], "max_size"), accumulate_grad_batches=2)
        sizes = [engine.window.share.size for _ in loader]
        assert sizes == [
            sum(len(part) for part in row if part) for row in by_hand("max_size", read(pair[0]()), read(pair[1]()))
        ]
    engine, loader = prepared(CombinedLoader([small(), large()]), accumulate_grad_batches=2)
    shares = [
        (engine.window.share.size, round(1 / engine.window.share.divisor, 6), engine.window.share.last) for _ in loader
    ]
    assert shares == [(5, 0.5, False), (5, 0.5, True), (4, 1.0, True)]


@pytest.mark.parametrize("other", [small, stream])
def test_an_empty_member(other: Any) -> None:
    for mode, expected in (("min_size", 0), ("max_size", len(read(other()))), ("sequential", len(read(other())))):
        loader = CombinedLoader([[], other()], mode)
        assert len(read(loader)) == expected
        _, loader = prepared(loader)
        if expected:
            assert len(read(loader)) == expected
        else:
            with pytest.raises(ValueError, match="CombinedLoader yielded no batch"):
                read(loader)


def test_containers_and_sizes() -> None:
    assert read(CombinedLoader({"a": small(), "b": large()}))[0] == {"a": [0, 1], "b": [100, 101, 102]}
    assert read(CombinedLoader((small(), large())))[0] == ([0, 1], [100, 101, 102])
    assert CombinedLoader([small(), large()]).batch_size == 5
    assert CombinedLoader([small(), large()], "sequential").batch_size is None
    assert CombinedLoader([small(), small()], "sequential").batch_size == 2
    assert CombinedLoader([small(), [1]]).batch_size is None


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_one_loader_alone_gives_its_own_batches(mode: str) -> None:
    for make in (small, large, stream):
        _, loader = prepared(CombinedLoader(make(), mode))
        _, alone = prepared(CombinedLoader([make()], mode))
        batches = read(loader)
        assert batches
        assert batches == [batch if mode == "sequential" else batch[0] for batch in read(alone)]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"mode='max_size_cycel'.*max_size_cycle"):
        CombinedLoader([small()], "max_size_cycel")
    with pytest.raises(TypeError, match="takes loaders, got str"):
        CombinedLoader("data")
    with pytest.raises(TypeError, match="0 cannot be iterated: int"):
        CombinedLoader(3)
    with pytest.raises(TypeError, match="'b' cannot be iterated: int"):
        CombinedLoader({"a": small(), "b": 3})
    with pytest.raises(ValueError, match="got no loaders"):
        CombinedLoader({})
    _, loader = prepared(CombinedLoader([iter([torch.ones(1)]), stream()], "max_size_cycle"))
    with pytest.raises(ValueError, match="yielded no batch when it was read again"):
        read(loader)
    _, loader = prepared(CombinedLoader([[], small()], "max_size_cycle"))
    with pytest.raises(ValueError, match="a list is empty and cannot be read again"):
        read(loader)
    divided = stream()
    divided.dataset.presharded = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="some of the loaders are presharded"):
        prepared(CombinedLoader([divided, small()]))


# -- training ---------------------------------------------------------------------------------------------------------------------


class Both(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(plain(batch))
        joined = torch.cat([batch["a"], batch["b"]])
        return (self.w * joined).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", torch.cat([part for part in batch.values() if part is not None]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(module: TrainModule, loader: Any, val: Any = None, **settings: Any) -> Any:
    return Fit(**{"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, "seed": 1, **settings}).run(
        module, loader, val
    )


def test_a_dict_of_loaders_is_trained_on_side_by_side() -> None:
    module = Both()
    result = fit(module, {"a": small(), "b": large()}, CombinedLoader({"a": small(), "b": large()}, "max_size"))
    assert [list(batch.values()) for batch in module.seen] == by_hand("max_size_cycle", read(small()), read(large()))
    # One mean over all 5 + 22 validation samples.
    assert result.metrics["mean"] == pytest.approx((sum(range(5)) + sum(range(100, 122))) / 27)


def test_a_list_of_loaders_is_trained_on_side_by_side() -> None:
    class Listed(Both):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(plain(batch))
            return (self.w * torch.cat(batch)).mean()

    module = Listed()
    fit(module, [small(), large()])
    assert module.seen == by_hand("max_size_cycle", read(small()), read(large()))


class Nested(Both):
    """Takes whatever the loaders give."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(plain(batch))
        return self.w.sum() * 0.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append([dataloader_idx, plain(batch)])


def third() -> Any:
    return DataLoader(range(200, 205), batch_size=2)


NESTED = {
    "a dict of lists": (lambda: {"a": [small(), large()], "b": third()}, lambda s, g, t: {"a": [s, g], "b": t}),
    "a list of tuples": (lambda: [(small(), third()), large()], lambda s, g, t: [(s, t), g]),
    "a list of dicts": (
        lambda: [{"a": small()}, {"b": large(), "c": [third()]}],
        lambda s, g, t: [{"a": s}, {"b": g, "c": [t]}],
    ),
    "a list of batches beside it": (
        lambda: {"a": [small(), large()], "b": list(third())},
        lambda s, g, t: {"a": [s, g], "b": t},
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_loaders_give_nested_batches(name: str) -> None:
    make, packed = NESTED[name]
    firsts = by_hand("max_size_cycle", read(small()), read(large()))
    rows = [(*row, batch) for row, batch in zip(firsts, itertools.cycle(read(third())), strict=False)]
    expected, sizes = [packed(*row) for row in rows], [sum(map(len, row)) for row in rows]
    module = Nested()
    fit(module, make())
    assert module.seen == expected
    engine, loader = prepared(CombinedLoader(make(), "max_size_cycle"), accumulate_grad_batches=2)
    assert [(plain(batch), engine.window.share.size) for batch in loader] == list(zip(expected, sizes, strict=True))


def test_nested_loaders_are_validated_on_one_after_the_other() -> None:
    lists = [[0, batch] for batch in read(small())] + [[1, batch] for batch in read(large())]
    expected = lists + [[2, batch] for batch in read(third())]
    for nested in (
        {"a": [small(), large()], "b": third()},
        [[small(), large()], third()],
        [small(), large(), list(third())],
    ):
        module = Nested()
        Fit(accelerator="cpu").validate(module, nested)
        assert module.seen == expected


def test_a_list_of_batches_has_no_loader_in_it() -> None:
    with pytest.raises(TypeError, match=r"a list of batches has a loader in it.*CombinedLoader"):
        Engine(accelerator="cpu").prepare_data_loader([torch.ones(1), small()])
    with pytest.raises(TypeError, match="CombinedLoader: 0 is a batch, not a loader: Tensor"):
        fit(Nested(), [torch.ones(1), small()])


def test_a_tuple_of_loaders_is_no_training_data() -> None:
    module = Both()
    with pytest.raises(TypeError, match="got a tuple of 2 DataLoaders as training data"):
        fit(module, (small(), [large(), large()]))
    with pytest.raises(
        TypeError, match=r"got a tuple of 2 DataLoaders as training data: give validation data as the second"
    ):
        fit(module, (small(), large()))
    assert module.seen == []


def test_a_dict_of_loaders_to_validate_on_is_several() -> None:
    class Each(Both):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("mean", batch.float().mean())

    metrics = fit(Each(), {"a": small(), "b": large()}, {"a": small(), "b": large()}).metrics
    assert metrics["mean/dataloader_idx_0"] == pytest.approx(2.0)
    assert metrics["mean/dataloader_idx_1"] == pytest.approx(110.5)


def trained(world_size: int) -> tuple[float, list[Any]]:
    """Global batches of four combined ones at any world size: the same weights."""
    module = Both()
    fit(
        module,
        {"a": small(shuffle=True), "b": large(shuffle=True)},
        accumulate_grad_batches=4 // world_size,
        max_epochs=2,
    )
    return module.w.item(), module.seen


def two_trained() -> Any:
    return trained(2)


def drawn_cycles() -> list[Any]:
    weighted = DataLoader(Numbers(5), 2, sampler=WeightedRandomSampler([1, 2, 3, 4, 5], 5), num_workers=1)
    _, loader = prepared(CombinedLoader([weighted, large(shuffle=True)], "max_size_cycle"))
    found = [plain(batch) for _ in range(2) for batch in loader]
    loader.resume(1, 4)  # in the second of three draws
    found += [plain(batch) for batch in loader]
    loader.close()
    return found


def two_drawn_cycles() -> Any:
    return drawn_cycles()


def two_read() -> Any:
    found = {}
    for mode in MODES:
        for name in ("indices", "a stream"):
            first, second = PAIRS[name]
            engine, loader = prepared(CombinedLoader([first(), second()], mode))
            found[f"{mode} {name}"] = [plain(batch) if engine.window.share.size else None for batch in loader]
    return found


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return ranks_of_file(__file__, 2, "two_")


@pytest.mark.parametrize("name", ["indices", "a stream"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_take_turns(two: dict[str, Any], mode: str, name: str) -> None:
    first, second = PAIRS[name]
    whole = by_hand(mode, read(first()), read(second()))
    ranks = [rank[f"{mode} {name}"] for rank in two["read"]]
    assert len(ranks[0]) == len(ranks[1]) == -(-len(whole) // 2)
    dealt = [batch for row in zip(*ranks, strict=True) for batch in row]
    assert dealt == whole + [None] * (len(whole) % 2)


def test_two_ranks_draw_together(two: dict[str, Any]) -> None:
    assert [batch for pair in zip(*two["drawn_cycles"], strict=True) for batch in pair] == drawn_cycles()


def test_two_ranks_are_trained_as_one(two: dict[str, Any]) -> None:
    weight, seen = trained(1)
    assert [rank[0] for rank in two["trained"]] == [pytest.approx(weight, rel=1e-6)] * 2
    by_rank = [rank[1] for rank in two["trained"]]
    assert [batch for pair in zip(*by_rank, strict=True) for batch in pair] == seen
