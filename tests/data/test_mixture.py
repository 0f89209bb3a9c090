"""Mixtures: shares, passes and counts follow from arithmetic; a resume repeats nothing and leaves nothing out, also where the mixture has changed.

Expected values are counted sample by sample, or come from an undisturbed run on one process.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from support.resumable import resumable_fit
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info, random_split

from callbacks import MixtureMonitor
from engine import Callback, CombinedLoader, Engine, Fit, Mixture, Packed, Run, TokenFile, TrainModule


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


class Numbers(Dataset[int]):
    """The numbers from ``low`` on."""

    def __init__(self, low: int, count: int) -> None:
        self.low, self.count = low, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.low + index


class Stream(IterableDataset[int]):
    """The numbers from ``low`` on, of several workers each its part; it can continue."""

    def __init__(self, low: int, count: int) -> None:
        self.low, self.count, self.at, self.epoch = low, count, 0, 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(self.low + first, self.low + self.count, step)
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Forgetful(Stream):
    """A stream without a state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]


LOW = {"web": 0, "code": 10_000, "math": 20_000, "wiki": 30_000}


def sources(**counts: int) -> dict[str, Any]:
    return {name: Numbers(LOW[name], count) for name, count in counts.items()}


def source_of(number: int) -> str:
    return list(LOW)[number // 10_000]


# -- the arithmetic of draws ----------------------------------------------------------------------------------------------------------


def test_shares_passes_and_counts() -> None:
    weights = {"web": 0.7, "code": 0.25, "math": 0.05}
    mixture = Mixture(sources(web=5000, code=2000, math=300), weights).seeded(3, True)
    assert len(mixture) == 6000  # the least of 5000 / 0.7, 2000 / 0.25 and 300 / 0.05
    numbers = mixture.__getitems__(range(18_000))
    assert numbers[7000:7100] == [mixture[draw] for draw in range(7000, 7100)]
    for draws in (0, 1, 17, 1023, 1024, 5999, 6000, 6001, 12_345, 18_000):
        counted = Counter(map(source_of, numbers[:draws]))
        assert mixture.counts(draws) == {name: counted[name] for name in weights}
    for epoch in (1, 2, 3):
        assert mixture.counts(6000 * epoch) == {"web": 4200 * epoch, "code": 1500 * epoch, "math": 300 * epoch}
    for name, size in (("web", 5000), ("code", 2000), ("math", 300)):
        own = [number for number in numbers if source_of(number) == name]
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size]) == list(range(LOW[name], LOW[name] + size))
        assert own[:size] != sorted(own[:size])
    assert mixture.counts(6 * 10**15) == {"web": 42 * 10**14, "code": 15 * 10**14, "math": 3 * 10**14}
    assert mixture.locate(7000) == (source_of(numbers[7000]), numbers[7000] % 10_000)
    assert [mixture.seeded(4, True)[draw] for draw in range(100)] != numbers[:100]


@pytest.mark.filterwarnings("ignore:an epoch of this mixture")
@pytest.mark.parametrize("number", range(6))
def test_random_mixtures(number: int) -> None:
    for chance in map(random.Random, range(1000 * number, 1000 * number + 50)):
        check_random_mixture(chance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an epoch of this mixture")
@pytest.mark.parametrize("number", range(6, 16))
def test_many_random_mixtures(number: int) -> None:
    for chance in map(random.Random, range(1000 * number, 1000 * number + 50)):
        check_random_mixture(chance)


def check_random_mixture(chance: random.Random) -> None:
    sizes = [chance.randint(1, 400) for _ in range(chance.randint(1, 9))]
    names = [f"s{s}" for s in range(len(sizes))]
    weights = [chance.choice([1, 2, 0.1, chance.random(), 1e-3]) for _ in sizes]
    stop = chance.choice(["first_exhausted", "all_exhausted"])
    if max(size / weight for size, weight in zip(sizes, weights, strict=True)) * sum(weights) > 3000:
        stop = "first_exhausted"
    given = {name: Numbers(1000 * s, size) for s, (name, size) in enumerate(zip(names, sizes, strict=True))}
    mixture = Mixture(given, dict(zip(names, weights, strict=True)), stop=stop).seeded(chance.randint(0, 99), True)
    length = len(mixture)
    limits = [
        Fraction(str(size)) * sum(map(Fraction, map(str, weights))) / Fraction(str(w))
        for size, w in zip(sizes, weights, strict=True)
    ]
    slack = (len(sizes) + 1) / 2
    if stop == "first_exhausted":
        assert max(1, min(limits) // 1 - slack) <= length <= max(1, min(limits) // 1)
    else:
        assert max(limits) <= length <= max(limits) + slack + 1
    if length > 3000:
        return
    numbers = mixture.__getitems__(range(3 * length))
    for epoch in (1, 3):
        per_source = Counter(number // 1000 for number in numbers[: epoch * length])
        for s, weight in enumerate(weights):
            assert abs(per_source[s] - weight / sum(weights) * epoch * length) <= (len(sizes) + 1) / 2 + 1e-6
            if epoch == 1 and stop == "first_exhausted":
                assert per_source[s] <= sizes[s]
            elif epoch == 1:
                assert per_source[s] >= sizes[s]
    draws = chance.randint(0, 3 * length)
    counted = Counter(number // 1000 for number in numbers[:draws])
    assert list(mixture.counts(draws).values()) == [counted[s] for s in range(len(sizes))]
    for s, size in enumerate(sizes):
        own = [number - 1000 * s for number in numbers if number // 1000 == s]
        for begin in range(0, len(own), size):
            part = own[begin : begin + size]
            assert len(set(part)) == len(part)  # once a pass, over three epochs


def test_proportional_is_each_sample_once_an_epoch_and_repeats_are_passes() -> None:
    mixture = Mixture(sources(web=1237, code=41, math=7)).seeded(1, True)
    numbers = mixture.__getitems__(range(2 * 1285))
    assert len(mixture) == 1285 == len(set(numbers[:1285])) == len(set(numbers[1285:]))
    assert numbers[:1285] != numbers[1285:]
    repeated = Mixture(sources(web=100, code=40, math=8), repeats={"code": 3, "math": 0.5}).seeded(1, True)
    assert len(repeated) == 224
    assert repeated.counts(224) == {"web": 100, "code": 120, "math": 4}
    assert len({repeated[draw] for draw in range(448)}) == 148
    even = Mixture(sources(web=900, code=100), temperature=2.0)  # sqrt(900) : sqrt(100)
    assert len(even) == 400
    assert even.counts(400) == {"web": 300, "code": 100}
    assert Mixture(sources(web=900, code=100), "equal").counts(200) == {"web": 100, "code": 100}
    assert Mixture(sources(web=900, code=100), "equal", samples=50).counts(150) == {"web": 75, "code": 75}
    assert len(Mixture(sources(web=900, code=100), "equal", stop="all_exhausted")) == 1800


def test_without_a_shuffle_the_sources_take_turns_evenly_each_in_its_order() -> None:
    mixture = Mixture(sources(web=60, code=20), {"web": 3, "code": 1}).seeded(5, False)
    numbers = [mixture[draw] for draw in range(160)]
    assert [source_of(number) for number in numbers[:8]] == ["web", "code", "web", "web", "web", "code", "web", "web"]
    assert [n for n in numbers if n < 10_000] == [*range(60), *range(60)]
    assert [n - 10_000 for n in numbers if n >= 10_000] == [*range(20), *range(20)]
    assert (
        list(Mixture(sources(web=6, code=2), {"web": 3, "code": 1})) == [mixture_6[d] for d in range(8)]
        if (mixture_6 := Mixture(sources(web=6, code=2), {"web": 3, "code": 1}))
        else False
    )


@pytest.mark.parametrize(
    ("second", "third"),
    [(500, 2000), ("500 samples", "2_000 samples"), ("0.5 epochs", "2 epochs"), ("3.2e4 tokens", "128000 tokens")],
)
def test_weights_by_stage(second: Any, third: Any) -> None:
    given = sources(web=10**4, code=10**4)
    for source in given.values():
        source.tokens_per_sample = 64
    stages = {0: {"web": 1, "code": 0}, second: "equal", third: {"web": 0, "code": 1}}
    mixture = Mixture(given, stages, samples=1000).seeded(1, True)
    assert mixture.tokens_per_sample == 64
    which = [mixture.locate(draw)[0] for draw in range(3000)]
    assert [which[a:b].count("code") for a, b in ((0, 500), (500, 1000), (500, 2000), (2000, 3000))] == [
        0,
        250,
        750,
        1000,
    ]
    numbers = [mixture[draw] for draw in range(3000)]
    assert len(set(numbers)) == 3000
    assert mixture.counts(2500) == {"web": 1250, "code": 1250}


def test_the_length_of_an_epoch_whose_weights_change_within_it() -> None:
    stages = {0: {"web": 1, "code": 0}, 100: {"web": 1, "code": 3}}
    assert len(Mixture(sources(web=150, code=600), stages)) == 300  # 100 of web, then a quarter of 200
    assert len(Mixture(sources(web=150, code=600), stages, stop="all_exhausted")) == 900
    assert len(Mixture(sources(web=150, code=600), {0: stages[0], "1 epoch": "equal"})) == 150
    with pytest.raises(ValueError, match=r"has no end.*samples="):
        Mixture(
            sources(web=150, code=600), {0: stages[0], 700: {"web": 1, "code": 0.0}, 90: "equal"}, stop="all_exhausted"
        )


# -- the dataset ---------------------------------------------------------------------------------------------------------------------------


class Table(Dataset[dict[str, int]]):
    """Rows that are read several at once; it remembers how often it was asked, and the epoch."""

    def __init__(self, low: int, count: int) -> None:
        self.low, self.count, self.asked, self.epoch = low, count, 0, -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"n": self.low + index}

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        self.asked += 1
        return [self[index] for index in indices]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_samples_are_read_at_once_and_labelled() -> None:
    web, code = Table(0, 80), [{"n": 10_000 + i} for i in range(20)]
    mixture = Mixture({"web": web, "code": code}, source_key="source").seeded(1, True)
    rows = mixture.__getitems__([*range(64), 99, 3])
    assert web.asked == 1
    assert rows == [mixture[draw] for draw in (*range(64), 99, 3)]
    assert all(row["source"] == (row["n"] >= 10_000) for row in rows)
    assert code[0] == {"n": 10_000}  # the user's samples have no new entry
    loader = Engine(accelerator="cpu").prepare_data_loader(DataLoader(mixture, batch_size=10))
    assert next(iter(loader))["source"].dtype == torch.int64
    assert web.epoch == 0
    with pytest.raises(TypeError, match="samples that are dicts, and 'web' gives int"):
        Mixture(sources(web=4), source_key="source")[0]
    with pytest.raises(ValueError, match="entry of this name already"):
        Mixture({"web": web}, source_key="n")[0]


def test_it_is_a_dataset_as_others() -> None:
    mixture = Mixture(sources(web=80, code=20))
    assert sorted(mixture) == sorted([*range(80), *range(10_000, 10_020)])
    assert pickle.loads(pickle.dumps(mixture))[5] == copy.deepcopy(mixture)[5] == mixture[torch.tensor(5)] == mixture[5]
    first, second = random_split(mixture, [60, 40])
    assert len({*first, *second}) == 100
    assert len(set(ConcatDataset([mixture, Numbers(50_000, 10)]))) == 110
    assert Subset(mixture, [3, 5])[1] == mixture[5]
    with pytest.raises(IndexError, match="begin with 0"):
        mixture[-1]
    with pytest.raises(ValueError, match="0 or more"):
        mixture.counts(-1)
    torch.manual_seed(0)
    plain = [n for batch in DataLoader(mixture, batch_size=7, shuffle=True, num_workers=1) for n in batch.tolist()]
    assert len(set(plain)) == 100


def test_a_mixture_of_mixtures_is_read_draw_by_draw() -> None:
    inner = Mixture(sources(code=30, math=10), {"code": 3, "math": 1})
    mixture = Mixture({"web": Numbers(0, 80), "inner": inner}, {"web": 2, "inner": 1}).seeded(2, True)
    numbers = [mixture[draw] for draw in range(3 * len(mixture))]
    own = [number for number in numbers if number >= 10_000]
    assert len(own) == 120
    assert [Counter(map(source_of, own[a : a + 40])) for a in (0, 40, 80)] == [{"code": 30, "math": 10}] * 3
    draw = next(draw for draw in range(50) if numbers[draw] >= 20_000)
    assert mixture.place_of(draw) == f"inner/math[{numbers[draw] - 20_000}]"
    draw = next(draw for draw in range(50) if numbers[draw] < 10_000)
    assert mixture.place_of(draw) == f"web[{numbers[draw]}]"


def test_many_samples_cost_nothing() -> None:
    mixture = Mixture(
        {"a": Numbers(0, 10**10), "b": Numbers(0, 10**9), "c": Numbers(0, 3)},
        {"a": 0.9, "b": 0.09, "c": 0.01},
        samples=10**10,
    )
    middle = 5 * 10**9
    numbers = mixture.seeded(1, True).__getitems__(range(middle, middle + 3000))
    assert len(set(numbers)) > 2900
    assert len(pickle.dumps(mixture)) < 5000


# -- what is refused -----------------------------------------------------------------------------------------------------------------------

TWO = {"web": Numbers(0, 10), "code": Numbers(0, 5)}


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {}, "takes a dict of name -> dataset"),
        ([TWO["web"]], {}, "takes a dict of name -> dataset.*got list"),
        ({0: TWO["web"]}, {}, "a source is called 0: give names as text"),
        ({"web": DataLoader(TWO["web"])}, {}, "'web' is a DataLoader, which gives batches: give its dataset"),
        ({"web": {"a": TWO["web"]}}, {}, r"'web' is a dict, not a dataset.*Mixture\(\{"),
        ({"web": "web.jsonl"}, {}, "'web' is a str, not a dataset"),
        ({"web": 3}, {}, r"'web' \(int\) cannot be read"),
        ({"web": iter([1])}, {"weights": {"web": 1}}, "list_iterator, which can be read only once"),
        ({"web": [], "code": [1]}, {}, "the source 'web' is empty"),
        (TWO, {"weights": {"web": 1, "cod": 1}}, r"names 'cod', which is not a source; did you mean 'code'\?.*'web', 'code'"),
        (TWO, {"weights": {"web": 1}}, "has no weight for 'code': give every source a number"),
        (TWO, {"weights": {"web": 1, "code": -0.1}}, "the value for 'code' is -0.1: give a finite number, 0 or more"),
        (TWO, {"weights": {"web": 1, "code": float("nan")}}, "the value for 'code' is nan"),
        (TWO, {"weights": {"web": 1, "code": float("inf")}}, "the value for 'code' is inf"),
        (TWO, {"weights": {"web": 1, "code": "2"}}, r"the value for 'code' is '2' \(str\): give a number"),
        (TWO, {"weights": {"web": 1, "code": None}}, "give a number"),
        (TWO, {"weights": {"web": True, "code": 1}}, "give a number"),
        (TWO, {"weights": {"web": 0, "code": 0}}, "all weights are 0"),
        (TWO, {"weights": {"web": 1, "code": 0}}, "'code' has weight 0 in weights, so it would never be read: remove it"),
        (TWO, {"weights": {0: {"web": 1, "code": 0}, 9: {"web": 2, "code": 0}}}, "'code' has weight 0 in all stages"),
        (TWO, {"weights": {0: {"web": 0, "code": 0}, 9: "equal"}}, "all weights are 0"),
        (TWO, {"weights": {5: "equal"}}, "the first stage begins at 5 samples"),
        (TWO, {"weights": {}}, "has no weight for 'web', 'code'"),
        (TWO, {"weights": "equl"}, r"did you mean 'equal'\?.*give 'proportional', 'equal', a dict"),
        (TWO, {"weights": [1, 2]}, "a dict of source name -> number"),
        (TWO, {"weights": {0: "equal", "5 bytes": "equal"}}, "'5 bytes' is not the start of a stage"),
        (TWO, {"weights": {0: "equal", "50": "equal"}}, "'50' has no unit"),
        (TWO, {"weights": {0: "equal", "10 min": "equal"}}, "not the start of a stage.*'2 epochs'"),
        (TWO, {"weights": {0: "equal", 1.5: "equal"}}, "1.5 .float. is not the start of a stage"),
        (TWO, {"weights": {0: "equal", -5: "equal"}}, "-5 is not the start of a stage"),
        (TWO, {"weights": {0: "equal", "2.5 steps": "equal"}}, "'2.5 steps' is not the start of a stage"),
        (TWO, {"weights": {0: "equal", 5: "equal", "5 samples": "equal"}}, "two stages begin at the same time"),
        (TWO, {"weights": {0: "equal", 5: "equal", "1 epoch": "equal"}}, r"several units \(epochs, samples\)"),
        (TWO, {"weights": {0: "equal", "0.5 epochs": {"web": 9, "code": 1}}}, "within the first epoch.*samples="),
        (TWO, {"temperature": 0}, r"temperature=0\): it must be a number above 0"),
        (TWO, {"temperature": float("nan")}, "temperature=nan"),
        (TWO, {"temperature": 1e-9}, r"temperature=1e-09\): the weight of 'web', 10, .* too large or too small for a share"),
        ({"a": [1], "b": [2]}, {"weights": {"a": 1, "b": 0.5}, "temperature": 1e-4}, "the weight of 'b', 0.5, .* too small for a share"),
        (TWO, {"repeats": {"wiki": 2}}, "names 'wiki', which is not a source"),
        (TWO, {"repeats": {"web": 0}}, "'web' is repeated 0 times"),
        (TWO, {"repeats": 2}, "give a dict of source name -> passes"),
        (TWO, {"repeats": {"web": 2}, "weights": "equal"}, "decides the weights"),
        (TWO, {"samples": 0}, "samples=0"),
        (TWO, {"samples": 10.0}, "give an int, the samples in an epoch"),
        (TWO, {"samples": 5, "stop": "all_exhausted"}, "both say when an epoch ends"),
        (TWO, {"stop": "first"}, r"stop='first'\) is unknown; did you mean 'first_exhausted'"),
        (TWO, {"on_change": "raise"}, "on_change='raise'.*possible: 'continue', 'error'"),
        (TWO, {"source_key": 1}, "give the name of an entry"),
        ({"web": Stream(0, 5), "code": TWO["code"]}, {}, "'web' is a stream, which has none: give weights="),
        ({"web": Stream(0, 5)}, {"repeats": {"web": 2}}, "'web' is a stream, which has none"),
        ({"web": Stream(0, 5)}, {"weights": {0: "proportional"}}, "'web' is a stream, which has none"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_that_says_what_to_give(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Mixture(given, **options)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


def test_a_source_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="has __getitem__ and no length: give it __len__"):
        Mixture({"web": NoLength()})


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda mixture: mixture[-1], r"Mixture\[-1\]: the draws .* begin with 0.*the last one of the first epoch is mixture\[14\]"),
        (lambda mixture: mixture.locate(-2), "begin with 0"),
        (lambda mixture: mixture["web"], r"Mixture\['web'\]: give an int, the number of a draw"),
        (lambda mixture: mixture[torch.tensor(2.5)], "give an int"),
        (lambda mixture: mixture[1:3], "give an int.*mixture.draws"),
        (lambda mixture: mixture.counts(-1), r"counts\(-1\): must be at least 0"),
        (lambda mixture: mixture.draws("0"), r"draws\('0'\): give an int"),
    ],
)  # fmt: skip
def test_what_is_not_a_draw_is_an_error(ask: Any, message: str) -> None:
    with pytest.raises((IndexError, TypeError, ValueError), match=message):
        ask(Mixture(TWO))


def test_a_source_without_a_sample_in_an_epoch_is_a_warning() -> None:
    said = "no sample of 'code', whose share of its 100 draws is 0.0001: the first comes after about 5,000 draws"
    with pytest.warns(UserWarning, match=said):
        mixture = Mixture(sources(web=10, code=10), {"web": 0.9999, "code": 0.0001}, samples=100)
    assert [mixture.counts(draws)["code"] for draws in (100, 4_000, 6_000)] == [0, 0, 1]


def test_the_length_of_an_epoch_is_known_or_an_error() -> None:
    """A step's samples are not known before a training, so stages that begin at a step leave the length as it is."""
    mixture = Mixture(sources(web=100, code=100), {0: "equal", "5 steps": {"web": 9, "code": 1}})
    for ask in (lambda: mixture[0], lambda: mixture.draws(0), lambda: mixture.locate(0)):
        with pytest.raises(
            ValueError, match=r"begins at 5 steps, .*Give the start in samples.* In a training with Fit"
        ):
            ask()
    length = len(mixture)
    mixture.count_steps(4)
    assert len(mixture) == length == 200
    assert mixture.counts(20) == {"web": 10, "code": 10}
    assert mixture.counts(40) == {"web": 28, "code": 12}
    unknown = Mixture(sources(web=100, code=100), {0: "equal", "64 tokens": {"web": 9, "code": 1}})
    with pytest.raises(
        ValueError, match="begins at 64 tokens, and its sources do not all have the same tokens_per_sample"
    ):
        len(unknown)


class Dicts(Numbers):
    """Samples that are dicts with these keys, of tensors with this shape."""

    def __init__(self, count: int, keys: str, shape: tuple[int, ...] = (3,)) -> None:
        super().__init__(0, count)
        self.keys, self.shape = keys.split(), shape

    def __getitem__(self, index: int) -> Any:
        return {key: torch.full(self.shape, index) for key in self.keys}


class DictStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([{"a": torch.zeros(3), "c": torch.zeros(3)}] * 9)


UNLIKE: dict[str, tuple[Any, str]] = {
    "keys": (lambda: {"web": Dicts(9, "a b"), "code": Dicts(9, "a")}, "a dict with the keys a(, b)?, and of '(web|code)' a dict with the keys a"),
    "other keys": (lambda: {"web": Dicts(9, "a b"), "code": Dicts(9, "a c")}, "keys a, [bc]"),
    "rows": (lambda: {"web": Dicts(9, "a"), "code": Dicts(9, "a", (4,))}, r"a sample\['a'\] of '(web|code)' is a tensor of shape \[[34]\]"),
    "types": (lambda: {"web": Dicts(9, "a"), "code": Numbers(0, 9)}, "a dict with the keys a"),
    "pairs": (lambda: {"web": [(1, 2)] * 9, "code": [(1, 2, 3)] * 9}, "tuple of [23]"),
    "entries": (lambda: {"web": [(1, "x")] * 9, "code": [(1, 2)] * 9}, r"a sample\[1\] of '(web|code)' is a (text|number)"),
    "a stream": (lambda: {"web": DictStream(), "code": Dicts(9, "a")}, "a dict with the keys a"),
    "a mixture": (lambda: {"web": Mixture({"x": Dicts(9, "a")}), "code": Dicts(9, "b")}, "a dict with the keys"),
    "in a mixture": (lambda: {"web": Mixture({"x": Dicts(9, "a"), "y": Dicts(9, "b")}), "code": Dicts(9, "a")}, "of '[xy]' a dict"),
    "packed": (lambda: {"web": Packed([[1] * 8] * 9, 8), "code": Packed([[1] * 9] * 9, 9)}, r"\['input_ids'\] of 'web' is .* shape \[8\], .* \[9\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
def test_sources_whose_samples_do_not_fit_into_a_batch_are_an_error_that_names_them(case: str, tmp_path: Path) -> None:
    given, message = UNLIKE[case]
    loader = DataLoader(Mixture(given(), weights="equal"), batch_size=8)
    module = Net()
    before = module.weight.weight.item()
    with pytest.raises(ValueError, match=rf"Mixture: .*{message}.*give DataLoader\(collate_fn=\)"):
        Fit(accelerator="cpu", max_epochs=1, root_dir=tmp_path, check=False).run(module, loader)
    assert module.weight.weight.item() == before


def test_packed_rows_beside_rows_of_a_file_are_refused_before_they_are_read(tmp_path: Path) -> None:
    TokenFile.write(tmp_path / "a.safetensors", [[1, 2, 3]] * 9)
    both = Mixture({"web": Packed([[1] * 3] * 9, 3), "code": TokenFile(tmp_path / "a.safetensors", 3)})
    with pytest.raises(
        ValueError,
        match="a sample of 'web' is a dict with the keys input_ids, labels, position_ids, document_ids, and of 'code' a dict with the keys "
        "input_ids, labels",
    ):
        Engine(accelerator="cpu").prepare(DataLoader(both, batch_size=2))
    # Somebody who joins them, or has one sample in a batch, may.
    collate = {"collate_fn": lambda rows: torch.stack([row["input_ids"] for row in rows])}
    for options in ({"batch_size": 2, **collate}, {"batch_size": 1}):
        assert len(list(Engine(accelerator="cpu").prepare(DataLoader(both, **options)))) > 5  # type: ignore[arg-type]


def test_many_passes_of_a_source_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="reads 'web' 1,000 times, because .* waits for 'code'"):
        Mixture(sources(web=10, code=10), {"web": 0.999, "code": 0.001 - 1e-6}, stop="all_exhausted")


@pytest.mark.parametrize("start", ["5 steps", "640 tokens"])
def test_a_stage_whose_first_draw_is_not_known_is_an_error_before_the_first_step(start: str) -> None:
    mixture = Mixture(sources(web=100, code=100), {0: "equal", start: {"web": 1, "code": 3}})
    with pytest.raises(ValueError, match=f"begins at {start}.*Give the start in samples"):
        next(iter(Engine(accelerator="cpu").prepare_data_loader(DataLoader(mixture, batch_size=10))))
    with pytest.raises(ValueError, match=f"begins at {start}"):
        mixture.counts(20)


# -- trainings -----------------------------------------------------------------------------------------------------------------------------


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers = batch["mix"] if isinstance(batch, dict) else batch
        return self.weight(numbers.float().unsqueeze(1) / 1e4).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Seen(Callback):
    """The numbers of each step on this rank, and of each validation."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}
        self.validated: list[list[int]] = []

    def on_train_batch_start(self, run: Run, module: Any, batch: Any, batch_idx: int) -> None:
        numbers = batch["mix"] if isinstance(batch, dict) else batch
        self.steps.setdefault(run.step, []).extend(numbers.tolist())

    def on_validation_epoch_start(self, run: Run, module: Any) -> None:
        self.validated.append([])

    def on_validation_batch_start(
        self, run: Run, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated[-1].extend(batch.tolist())


def train(data: Any, folder: Path | str, val: Any = None, **settings: Any) -> tuple[Seen, Any]:
    seen, resume = Seen(), settings.pop("resume", None)
    fit = resumable_fit(folder, seen, **{"devices": 1, **settings})
    return seen, fit.run(Net(), data, val, resume=resume)


WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}


def mixture_of(kind: str, **options: Any) -> Mixture:
    """A mixture of 100, 50 and 30 numbers: of datasets, of streams, of both, or by stage."""
    options = {"weights": WEIGHTS, **options}
    if kind == "stages":
        options["weights"] = {0: {"web": 0.9, "code": 0.1, "math": 0}, 130: "equal", "280 samples": WEIGHTS}
        options["samples"] = 120
    counts = {"web": 100, "code": 50, "math": 30, **options.pop("counts", {})}
    given: dict[str, Any] = sources(**counts)
    if kind in ("streams", "both"):
        given |= {name: Stream(LOW[name], counts[name]) for name in (("web",) if kind == "both" else counts)}
    return Mixture(given, **options)


def loader_of(kind: str, ranks: int, **options: Any) -> Any:
    workers = 2 if kind.endswith("workers") else 0
    mixture = mixture_of(kind.split()[0], **options)
    if isinstance(mixture, IterableDataset):
        return DataLoader(mixture, 3, num_workers=workers, persistent_workers="persistent" in kind)
    return DataLoader(mixture, 12 // ranks, shuffle=True, num_workers=workers)


KINDS = ("map", "streams", "both", "stages")
SLOW_KINDS = ("map workers", "streams workers", "both workers", "streams persistent workers")
CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"weights": {"web": 0.3, "code": 0.3, "math": 0.4}},
    "added": {"weights": {**WEIGHTS, "wiki": 0.5}, "counts": {"wiki": 80}},
    "removed": {"weights": {"web": 0.6, "math": 0.1}},
    "grown": {"counts": {"code": 75, "math": 61}},
    "length": {"samples": 100},
    "shorter": {"samples": 20},
}
SETTINGS = {"global_batch_size": 12}
STOP = 17


def changed(change: str) -> dict[str, Any]:
    options = dict(CHANGES[change])
    if change == "removed":
        given = sources(web=100, math=30)
        return {"given": given, **options}
    return options


def changed_loader(change: str, ranks: int) -> Any:
    options = changed(change)
    given = options.pop("given", None)
    mixture = Mixture(given, **options) if given else mixture_of("map", **options)
    return DataLoader(mixture, 12 // ranks, shuffle=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixtures")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, dict[int, list[int]]]:
    """By kind, the steps of an undisturbed training on one process; checkpoints after the first steps are in the folder."""
    return {kind: steps_and_checkpoint(kind, folder) for kind in KINDS}


def steps_and_checkpoint(kind: str, folder: Path) -> dict[int, list[int]]:
    whole, _ = train(loader_of(kind, 1), folder / "whole", max_steps=26, **SETTINGS)
    _, result = train(loader_of(kind, 1), folder / "one" / kind, max_steps=STOP, **SETTINGS)
    (folder / f"{kind}.txt").write_text(str(result.last_checkpoint))
    return whole.steps


@pytest.fixture(scope="module")
def two(folder: Path, saved: Any) -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_", MIXTURES=str(folder))


def two_resumed() -> dict[str, dict[int, list[int]]]:
    return resumed_on(2, KINDS)


def slow_resumed() -> dict[str, dict[int, list[int]]]:
    return resumed_on(int(os.environ["WORLD_SIZE"]), (*KINDS, *SLOW_KINDS))


def resumed_on(ranks: int, kinds: Sequence[str]) -> dict[str, dict[int, list[int]]]:
    folder = Path(os.environ["MIXTURES"])
    steps = {}
    for kind in kinds:
        strategy = "fsdp" if kind == "map" else "ddp"
        checkpoint = (folder / f"{kind}.txt").read_text()
        seen, _ = train(
            loader_of(kind, ranks),
            folder / f"on {ranks}" / kind,
            max_steps=26,
            resume=checkpoint,
            devices=ranks,
            strategy=strategy,
            **SETTINGS,
        )
        steps[kind] = seen.steps
    return steps


def two_monitored() -> list[Any]:
    """The table of a run in which ranks count batches: the last one of the only epoch is repeated on rank 1, at weight 0."""
    rows = [{"n": i} for i in range(9)]
    streams = Mixture({"web": rows, "code": TableStream(10_000, 60)}, {"web": 1, "code": 3}, source_key="source")
    fit = Fit(
        accelerator="cpu",
        devices=2,
        seed=3,
        root_dir=os.environ["MIXTURES"],
        callbacks=[MixtureMonitor()],
        check=False,
        max_epochs=1,
    )
    result = fit.run(TableNet(), DataLoader(streams, 4))
    return [[row["source"], row["samples"], row.get("loss")] for row in result.tables["mixture"]]


class TableStream(IterableDataset[dict[str, int]]):
    def __init__(self, low: int, count: int) -> None:
        self.low, self.count = low, count

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"n": self.low + i} for i in range(self.count))


class TableNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.weight(torch.ones(len(batch["n"]), 1)).squeeze(1) * 0.0 + (batch["n"] >= 10_000)
        return {"loss": losses.mean(), "losses": losses}


def two_saved() -> dict[str, str]:
    folder, names = Path(os.environ["MIXTURES"]), {}
    for kind in ("map", "streams", "stages"):
        _, result = train(loader_of(kind, 2), folder / "of two" / kind, max_steps=STOP, devices=2, **SETTINGS)
        names[kind] = str(result.last_checkpoint)
    return names


def two_changed() -> dict[str, dict[int, list[int]]]:
    folder, steps = Path(os.environ["MIXTURES"]), {}
    checkpoint = (folder / "map.txt").read_text()
    for change in CHANGES:
        seen, result = train(
            changed_loader(change, 2),
            folder / "changed" / change,
            max_steps=26,
            resume=checkpoint,
            devices=2,
            **SETTINGS,
        )
        seen_again, _ = train(
            changed_loader(change, 2),
            folder / "again" / change,
            max_steps=40,
            resume=result.last_checkpoint,
            devices=2,
            **SETTINGS,
        )
        steps[change] = {**seen.steps, **seen_again.steps}
    return steps


def together(by_rank: list[Mapping[Any, list[int]]]) -> dict[int, list[int]]:
    """The numbers of each step on all ranks."""
    return {int(step): sorted(n for rank in by_rank for n in rank[step]) for step in by_rank[0]}


def in_order(steps: Mapping[Any, list[int]]) -> dict[int, list[int]]:
    return {int(step): sorted(numbers) for step, numbers in steps.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_on_two_ranks_has_the_steps_of_the_undisturbed_run(kind: str, saved: Any, two: Any) -> None:
    resumed = together([rank[kind] for rank in two["resumed"]])
    assert resumed == {step: numbers for step, numbers in in_order(saved[kind]).items() if step >= STOP}
    assert min(resumed) == STOP


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_resume_with_workers_and_on_four_ranks(ranks: int, folder: Path, saved: Any) -> None:
    whole = {**saved, **{kind: steps_and_checkpoint(kind, folder) for kind in SLOW_KINDS}}
    resumed = ranks_of_file(__file__, ranks, "slow_", MIXTURES=str(folder))["resumed"]
    for kind, steps in whole.items():
        expected = {step: numbers for step, numbers in in_order(steps).items() if step >= STOP}
        assert together([rank[kind] for rank in resumed]) == expected, kind


@pytest.mark.parametrize("kind", ["map", "streams", "stages"])
def test_a_resume_on_one_rank_has_the_steps_of_the_undisturbed_run(
    kind: str, saved: Any, two: Any, folder: Path
) -> None:
    seen, _ = train(loader_of(kind, 1), folder / "back" / kind, max_steps=26, resume=two["saved"][0][kind], **SETTINGS)
    assert seen.steps == {step: numbers for step, numbers in saved[kind].items() if step >= STOP}


def test_the_ranks_count_the_sources_of_their_batches(two: Any) -> None:
    one = list(Mixture({"web": [0] * 9, "code": Stream(10_000, 60)}, {"web": 1, "code": 3}).seeded(3, True))
    web = one.count(0)
    assert two["monitored"] == [[["web", web, 0.0], ["code", len(one) - web, 1.0]]] * 2


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_mixture_repeats_nothing_and_leaves_nothing_out(change: str, saved: Any, two: Any) -> None:
    before = [n for step, numbers in saved["map"].items() if step < STOP for n in numbers]
    changed_steps = together([rank[change] for rank in two["changed"]])
    after = [changed_steps[step] for step in sorted(changed_steps)]
    assert sorted(changed_steps) == list(range(STOP, 40))
    counts = {"web": 100, "code": 50, "math": 30, "wiki": 80}
    new_counts = {**counts, **CHANGES[change].get("counts", {})}
    for name in WEIGHTS if change != "added" else counts:
        read = [n for n in before if source_of(n) == name]
        # Within a step the order of the ranks' samples is lost; passes are followed step by step.
        rest = [[n for n in numbers if source_of(n) == name] for numbers in after]
        if change == "removed" and name == "code":
            assert not any(rest)
            continue
        assert any(rest)
        check_passes(read, rest, LOW[name], counts[name], new_counts[name])


def check_passes(read: list[int], rest: list[list[int]], low: int, count: int, new_count: int) -> None:
    """Every pass has every sample once: those of ``read`` in order, of ``rest`` in steps without an order."""
    seen = set(read[len(read) - len(read) % count :])
    for numbers in rest:
        left = Counter(numbers)
        while left:
            unread = set(range(low, low + new_count)) - seen
            if not unread:
                seen = set()
                continue
            taken = unread & set(left)
            if len(taken) < len(unread):  # the pass does not end in this step: all are new, and once
                assert sum(left.values()) == len(taken)
            seen |= taken
            left -= Counter(taken)


def test_each_change_is_a_line_of_the_log(folder: Path, saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = (folder / "map.txt").read_text()
    engine = Engine(accelerator="cpu", seed=3)
    state = json.loads(json.dumps(engine.prepare_data_loader(loader_of("map", 1)).state_dict()))  # plain values
    assert set(state["draws"]["counts"]) == {"web", "code", "math"}
    with caplog.at_level(logging.INFO, "engine"):
        train(changed_loader("added", 1), folder / "lines", max_steps=STOP + 1, resume=checkpoint, **SETTINGS)
    lines = [record.message for record in caplog.records if "the mixture" in record.message]
    count = sum(n < 10_000 for step, numbers in saved["map"].items() if step < STOP for n in numbers)
    assert lines[0] == (
        f"the mixture's source 'web' has a share of 40 % from draw 202 on, and had 60 %; it continues after {count} samples"
    )
    assert lines[3:] == [
        "the mixture has the new source 'wiki' with a share of 33.33 % from draw 202 on",
        "an epoch of the mixture has 240 samples, and had 166",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "engine"):
        train(loader_of("map", 1), folder / "lines 2", max_steps=STOP + 1, resume=checkpoint, **SETTINGS)
    assert not [record for record in caplog.records if "the mixture" in record.message]
    strict = mixture_of("map", **CHANGES["grown"], on_change="error")
    with pytest.raises(
        ValueError,
        match=r"on_change='error'.*'code' has 75 samples.*Give the mixture as it was, or on_change='continue'",
    ):
        train(
            DataLoader(strict, 12, shuffle=True), folder / "strict", max_steps=STOP + 1, resume=checkpoint, **SETTINGS
        )


def test_a_replay_names_source_and_index(folder: Path, saved: Any) -> None:
    run = (folder / "map.txt").read_text()
    step = Fit(
        accelerator="cpu", devices=1, seed=3, root_dir=folder / "replay", check=False, max_epochs=4, **SETTINGS
    ).replay(Net(), loader_of("map", 1), run=run, step=STOP + 3)
    numbers = saved["map"][STOP + 2]
    assert step.samples == [f"{source_of(n)}[{n % 10_000}]" for n in numbers]
    assert f"samples: {step.samples[0]}, " in str(step)


def test_another_kind_of_data_than_the_checkpoints_is_a_warning(
    folder: Path, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = DataLoader(Numbers(0, len(mixture_of("map"))), 12, shuffle=True)
    train(plain, folder / "plain", max_steps=STOP + 1, resume=(folder / "map.txt").read_text(), **SETTINGS)
    assert "the checkpoint's data was a mixture, and this run's is not one: samples may be repeated" in caplog.text
    caplog.clear()
    _, result = train(plain, folder / "plain first", max_steps=STOP, **SETTINGS)
    train(loader_of("map", 1), folder / "now mixed", max_steps=STOP + 1, resume=result.last_checkpoint, **SETTINGS)
    assert "the checkpoint's data was not a mixture, and this run's is one" in caplog.text


def test_limits_accumulation_and_validation(tmp_path: Path) -> None:
    given = {"counts": {}, "weights": WEIGHTS}
    whole, _ = train(DataLoader(mixture_of("map", **given), 5, shuffle=True), tmp_path, max_epochs=2)
    n = len(mixture_of("map"))
    flat = [number for numbers in whole.steps.values() for number in numbers]
    validation = DataLoader(Mixture(sources(web=90, code=10), "equal"), 10)
    limited, _ = train(
        DataLoader(mixture_of("map"), 5, shuffle=True),
        tmp_path,
        validation,
        max_epochs=3,
        limit_train_batches=4,
        num_sanity_val_steps=1,
    )
    numbers = [number for step in limited.steps.values() for number in step]
    assert numbers[:40] == [*flat[:20], *flat[n : n + 20]]  # the rest of each epoch's draws is left out
    assert len({tuple(validated) for validated in limited.validated[-3:]}) == 1  # always the same samples
    assert Counter(map(source_of, limited.validated[-1])) == {"web": 10, "code": 10}
    accumulated, _ = train(
        DataLoader(mixture_of("map"), 5, shuffle=True), tmp_path, max_epochs=1, accumulate_grad_batches=3
    )
    assert [number for step in accumulated.steps.values() for number in step] == flat[:n]
    overfit, _ = train(DataLoader(mixture_of("map"), 5), tmp_path, max_epochs=2, overfit_batches=2)
    numbers = [number for step in overfit.steps.values() for number in step]
    assert numbers[:10] == numbers[10:]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "sequential", "streams"])
def test_members_of_a_combined_loader(mode: str, tmp_path: Path) -> None:
    def data() -> Any:
        if mode == "streams":
            return CombinedLoader({"mix": DataLoader(mixture_of("both"), 5), "x": DataLoader(Numbers(40_000, 450), 5)})
        members = {"mix": DataLoader(mixture_of("map"), 5, shuffle=True), "x": DataLoader(Numbers(40_000, 450), 5)}
        return CombinedLoader({"mix": members["mix"]} if mode == "sequential" else members, mode)

    seen, result = train(data(), tmp_path / "a", max_steps=50)
    again, _ = train(data(), tmp_path / "b", max_steps=80, resume=result.last_checkpoint)
    whole, _ = train(data(), tmp_path / "c", max_steps=80)
    assert {**seen.steps, **again.steps} == whole.steps
    numbers = [number for step in whole.steps.values() for number in step if number < 10_000]
    read: list[list[int]] = [numbers[a : a + 100] for a in range(0, len(numbers), 100)]
    if mode != "max_size_cycle":  # there the last start within an epoch is cut
        assert all(len(set(part)) == len(part) for part in read)


def test_stages_in_steps_need_a_global_batch_size(tmp_path: Path) -> None:
    def data() -> Any:
        stages = {0: {"web": 1, "code": 0}, "5 steps": {"web": 0, "code": 1}}
        return DataLoader(Mixture(sources(web=1000, code=1000), stages), 6, shuffle=True)

    seen, _ = train(data(), tmp_path, max_steps=10, global_batch_size=12)
    assert [{*map(source_of, numbers)} for numbers in seen.steps.values()] == [{"web"}] * 5 + [{"code"}] * 5
    with pytest.raises(ValueError, match=r"begins at 5 steps.*global_batch_size=<int>"):
        train(data(), tmp_path, max_steps=10)
    with pytest.raises(ValueError, match=r"begins at 5 steps.*without limit_train_batches"):
        train(data(), tmp_path, max_steps=10, global_batch_size=12, limit_train_batches=8)


# -- Engine ----------------------------------------------------------------------------------------------------------------------------------


def test_a_loop_with_engine_continues_a_changed_mixture(tmp_path: Path) -> None:
    def engine_and_loader(**options: Any) -> tuple[Engine, Any]:
        engine = Engine(accelerator="cpu", seed=3)
        return engine, engine.prepare_data_loader(DataLoader(mixture_of("map", **options), 10, shuffle=True))

    engine, loader = engine_and_loader()
    model = engine.prepare_model(torch.nn.Linear(1, 1))
    assert model is not None
    before = [n for _, batch in zip(range(8), loader, strict=False) for n in batch.tolist()]
    engine.save_state(tmp_path / "a")
    engine, loader = engine_and_loader(weights={"web": 0.2, "code": 0.5, "math": 0.3})
    engine.prepare_model(torch.nn.Linear(1, 1))
    engine.load_state(tmp_path / "a")
    after = [n for batch in loader for n in batch.tolist()]
    web = [n for n in [*before, *after] if source_of(n) == "web"]
    assert len(set(web)) == len(web)
    assert 30 < Counter(map(source_of, before))["web"] < 60
    skipped = list(loader.skipping(1))
    assert skipped


# -- streams ---------------------------------------------------------------------------------------------------------------------------------


def stream_mixture(**options: Any) -> Mixture:
    given = {"web": Stream(0, 90), "code": Stream(10_000, 20)}
    return Mixture(given, **{"weights": {"web": 3, "code": 1}, **options}).seeded(1, True)


def test_streams_end_with_the_first_or_the_last_and_continue() -> None:
    mixture = stream_mixture()
    assert isinstance(mixture, IterableDataset)
    first, second = list(mixture), list(mixture)
    code = [n for n in [*first, *second] if n >= 10_000]
    assert code == [*range(10_000, 10_020), *range(10_000, 10_020)][: len(code)]
    assert first.count(10_019) == 1
    assert [n for n in [*first, *second] if n < 10_000] == [*range(90)]  # the second epoch ends with this stream
    assert 60 <= len(first) <= 80
    longest = list(stream_mixture(stop="all_exhausted"))
    assert {*range(90)} <= {*longest}
    assert longest.count(10_000) == 2
    assert len(list(stream_mixture(samples=50))) == 50
    with pytest.raises(TypeError, match="has no length"):
        len(mixture)


@pytest.mark.parametrize("kind", [Stream, Forgetful])
def test_a_stream_continues_from_its_state_or_is_read_again(kind: Any) -> None:
    def made() -> Any:
        return Mixture({"web": kind(0, 90), "code": Numbers(10_000, 20)}, {"web": 3, "code": 1}).seeded(1, True)

    mixture, whole = made(), made()
    numbers = [*whole, *whole]
    taken = [n for n, _ in zip(mixture, range(50), strict=False)][:50]
    state = json.loads(json.dumps(_state_after(made(), 50)))
    assert taken == numbers[:50]
    assert state["draws"] == 50
    assert sum(state["counts"].values()) == 50
    resumed = made()
    resumed.load_state_dict(state)
    if kind is Forgetful:
        with pytest.warns(
            UserWarning, match="'web' has no state from which it can continue: .* samples are read and discarded"
        ):
            rest = list(resumed)
    else:
        rest = list(resumed)
    assert [*numbers[:50], *rest, *resumed] == numbers


def test_a_monitor_counts_on_where_a_resume_has_changed_the_weights(tmp_path: Path) -> None:
    def fit(steps: int) -> Fit:
        return resumable_fit(tmp_path, MixtureMonitor(), max_steps=steps, max_epochs=9)

    saved = fit(3).run(Net(), DataLoader(mixture_of("map"), 12, shuffle=True))
    weights = {"web": 0.1, "code": 0.1, "math": 0.8}
    resumed = fit(5).run(Net(), DataLoader(mixture_of("map", weights=weights), 12, shuffle=True), resume="last")
    before, after = ([row["samples"] for row in result.tables["mixture"]] for result in (saved, resumed))
    assert sum(before) == 36
    # An epoch of the new weights has 37 draws, 30 / 0.8: the one that is left of it, and a step of the next.
    assert sum(after) == 36 + 1 + 12
    assert 9 <= after[2] - before[2] <= 11


def test_a_state_of_each_place_continues_the_same_epochs() -> None:
    def made() -> Any:
        given = {"a": Numbers(0, 30), "b": Stream(1000, 25), "c": Numbers(2000, 9)}
        return Mixture(given, {"a": 0.6, "b": 0.3, "c": 0.1}).seeded(1, True)

    whole = made()
    first, second = list(whole), list(whole)
    for count in range(1, len(first) + 1):
        resumed = made()
        resumed.load_state_dict(_state_after(made(), count))
        assert list(resumed) == first[count:], count
        assert list(resumed) == second, count


def _state_after(mixture: Any, count: int) -> Any:
    iterator = iter(mixture)
    for _ in range(count):
        next(iterator)
    return mixture.state_dict()


def test_a_changed_mixture_of_streams_continues_each() -> None:
    state = _state_after(stream_mixture(), 40)
    changed = Mixture(
        {"web": Stream(0, 90), "code": Stream(10_000, 20), "math": Numbers(20_000, 50)},
        {"web": 1, "code": 1, "math": 2},
    ).seeded(1, True)
    assert isinstance(changed, IterableDataset)
    changed.load_state_dict(state)  # type: ignore[attr-defined]
    rest = list(changed)
    web, code = state["counts"]["web"], state["counts"]["code"]
    assert [n for n in rest if n < 10_000] == list(range(web, web + sum(n < 10_000 for n in rest)))
    assert [n for n in rest if 10_000 <= n < 20_000] == list(range(10_000 + code, 10_020))
    math = [n for n in rest if n >= 20_000]
    assert len(math) == len(set(math)) > 15
    lines = changed.changes_since(state)
    assert lines[-1] == "the mixture has the new source 'math' with a share of 50 % from draw 40 on"
    assert "'web' has a share of 25 % from draw 40 on, and had 75 %" in lines[0]


def test_a_validation_of_streams_reads_the_same_samples_each_time(tmp_path: Path) -> None:
    seen, _ = train(
        DataLoader(mixture_of("map"), 12, shuffle=True),
        tmp_path,
        DataLoader(mixture_of("both"), 4),
        max_epochs=3,
        limit_val_batches=3,
    )
    assert seen.validated[-1] == seen.validated[-2] == seen.validated[-3]
    assert len(seen.validated[-1]) == 12


def test_an_empty_stream_and_too_many_workers_are_errors() -> None:
    for stop in ("all_exhausted", "first_exhausted"):
        with pytest.raises(ValueError, match="'web' gave no sample: it is empty"):
            list(Mixture({"web": Stream(0, 0), "code": Stream(0, 5)}, "equal", stop=stop))
    staged = Mixture({"web": Stream(0, 30), "code": Stream(0, 5)}, {0: "equal", 9: {"web": 1, "code": 0}})
    with pytest.raises(ValueError, match=r"read by several workers.*give samples="):
        list(DataLoader(staged, num_workers=2))
