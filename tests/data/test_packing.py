"""Packed rows: every token once, no row longer, no document sees another, and a step that equals one batch of separate documents.

Expected values are counted token by token, or come from each document alone in a bare loop.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import forget_warnings
from support.ranks import ranks_of_file
from support.resumable import resumable_fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from engine import (
    Callback,
    Fit,
    Loss,
    Mixture,
    Packed,
    PackedStream,
    TokenBudget,
    TrainModule,
    document_lengths,
    document_mask,
)
from engine.data.packing import best_fit_decreasing

VOCABULARY = 61


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


def texts(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different: their number in hundreds of thousands, and the place."""
    return [[number * 100_000 + place + 1 for place in range(length)] for number, length in enumerate(lengths)]


def documents_in(row: dict[str, Tensor]) -> list[list[int]]:
    """The tokens of each document of a row; checks positions, labels and padding on the way."""
    fields = {name: values.tolist() for name, values in row.items()}
    assert list(fields) == ["input_ids", "labels", "position_ids", "document_ids"]
    assert {values.dtype for values in row.values()} == {torch.int64}
    documents: list[list[int]] = []
    for token, label, position, number in zip(*fields.values(), strict=True):
        if number == -1:
            assert (token, label, position) == (0, -100, 0)
            continue
        if position == 0:
            documents.append([])
        assert number == len(documents) - 1
        assert position == len(documents[-1])
        assert label == (-100 if position == 0 else token)
        documents[-1].append(token)
    assert fields["document_ids"].count(-1) == len(fields["input_ids"]) - sum(map(len, documents))
    assert -1 not in fields["document_ids"][: sum(map(len, documents))]
    return documents


def expected_pieces(lengths: list[int], length: int, overflow: str) -> list[list[int]]:
    pieces = []
    for text in texts(lengths):
        if len(text) <= length:
            pieces.append(text)
        elif overflow == "truncate":
            pieces.append(text[:length])
        elif overflow == "split":
            pieces += [text[start : start + length] for start in range(0, len(text), length)]
    return sorted(filter(None, pieces))


class Stream(IterableDataset[Any]):
    """Documents one after the other; it can continue."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents, self.at = documents, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.documents):
            self.at += 1
            yield self.documents[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
OVERFLOW = st.sampled_from(["split", "truncate", "drop"])


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 50), OVERFLOW, st.integers(0, 3))
def test_every_token_is_in_one_row_once(lengths: list[int], length: int, overflow: str, seed: int) -> None:
    check_packing(lengths, length, overflow, seed)


@pytest.mark.slow
def test_many_random_packings() -> None:
    for chance in map(random.Random, range(500)):
        longest = chance.choice([5, 40, 400])
        lengths = [chance.randint(0, longest) for _ in range(chance.randint(1, 200))]
        check_packing(
            lengths, chance.randint(1, 500), chance.choice(["split", "truncate", "drop"]), chance.randint(0, 9)
        )


def check_packing(lengths: list[int], length: int, overflow: str, seed: int) -> None:
    expected = expected_pieces(lengths, length, overflow)
    if not expected:
        with pytest.raises(ValueError, match="documents has a token to pack"):
            Packed(texts(lengths), length, overflow=overflow)
        return
    rows = Packed(texts(lengths), length, overflow=overflow, seed=seed)
    assert sorted(text for row in rows for text in documents_in(row)) == expected
    assert all(len(row["input_ids"]) == length for row in rows)
    assert rows.tokens == sum(map(len, expected))
    assert rows.fill == rows.tokens / (len(rows) * length)
    sizes = sorted(map(len, expected))
    assert -(-sum(sizes) // length) <= len(rows) <= max(1, 2 * -(-sum(sizes) // length))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 50), OVERFLOW, st.integers(1, 5), st.integers(0, 30))
def test_every_token_of_a_stream_is_in_one_row_once_also_if_it_is_continued(
    lengths: list[int], length: int, overflow: str, bins: int, stop: int
) -> None:
    def packed() -> Any:
        return PackedStream(Stream(texts(lengths)), length, overflow=overflow, bins=bins)

    whole = [documents_in(row) for row in packed()]
    assert sorted(text for row in whole for text in row) == expected_pieces(lengths, length, overflow)
    first, read = packed(), []
    rows = iter(first)
    for row in rows:
        read.append(documents_in(row))
        if len(read) == stop:
            break
    state = first.state_dict()
    resumed = packed()
    resumed.load_state_dict(state)
    read += [documents_in(row) for row in resumed] if len(read) == stop else []
    assert read == whole


def test_the_least_number_of_rows_at_the_price_of_a_sort() -> None:
    generator = numpy.random.default_rng(0)
    lengths = numpy.minimum(generator.lognormal(4, 1, 20_000).astype(numpy.int64) + 1, 2048)
    items, ends = best_fit_decreasing(lengths, 2048)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    assert len(ends) <= 1.001 * lengths.sum() / 2048 + 1
    filled = numpy.add.reduceat(lengths[items], numpy.r_[0, ends[:-1]])
    assert filled.max() <= 2048


def best_fit_by_hand(lengths: list[int], capacity: int) -> list[int]:
    """The sizes of rows, one document after the other."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if row + length <= capacity]
        if fitting:
            rows[rows.index(max(fitting))] += length
        else:
            rows.append(length)
    return sorted(rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(30, 60))
def test_rows_are_those_of_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    items, ends = best_fit_decreasing(numpy.array(lengths), capacity)
    rows = [int(sum(lengths[item] for item in part)) for part in numpy.split(items, ends[:-1])]
    assert sorted(rows) == best_fit_by_hand(lengths, capacity)


def test_labels_of_ones_own_keep_what_has_no_target() -> None:
    chat = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, 6])},
        {"input_ids": numpy.array([7], dtype=numpy.uint16)},
    ]
    expected = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 9], "labels": [-100, -100, 3, 4, -100, 6, -100, -100]}
    stream = next(iter(PackedStream(iter(chat), 8, pad=9)))
    for row in (Packed(chat, 8, pad=9)[0], Packed(chat, 8, pad=9)[-1], stream):
        assert {name: row[name].tolist() for name in expected} == expected
        assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
        assert row["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 2, -1]
    other = [{"tokens": text} for text in texts([3, 2])]
    assert len(documents_in(Packed(other, 5, key="tokens")[0])) == 2


class Table(Dataset[Any]):
    """Documents with a column of lengths, which counts how often each is read."""

    column_names = ("input_ids", "n")

    def __init__(self, lengths: list[int]) -> None:
        self.texts, self.reads, self.epochs = texts(lengths), 0, list[int]()

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        if index == "n":
            return list(map(len, self.texts))
        self.reads += 1
        return {"input_ids": self.texts[index], "n": len(self.texts[index])}

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_lengths_are_measured_only_if_nothing_knows_them() -> None:
    lengths = [3, 1, 4, 1, 5]
    for known in (lengths, numpy.array(lengths, dtype=numpy.uint8), torch.tensor(lengths), "n"):
        table = Table(lengths)
        rows = Packed(table, 8, lengths=known)
        assert table.reads == 0
        assert sorted(text for row in rows for text in documents_in(row)) == sorted(texts(lengths))
    table = Table(lengths)
    assert len(Packed(table, 8)) == 2
    assert table.reads == 5
    Packed(table, 8, lengths="n").set_epoch(4)
    assert table.epochs == [4]
    assert len(Packed([{"input_ids": [1], "n": 1}], 4, lengths="n")) == 1


def test_rows_are_the_same_in_each_process_and_small_when_sent() -> None:
    lengths = numpy.random.default_rng(0).integers(1, 200, 2000)
    first, again = (Packed(texts(lengths.tolist()), 256, lengths=lengths) for _ in range(2))
    assert all(torch.equal(first[row]["input_ids"], again[row]["input_ids"]) for row in range(0, len(first), 50))
    first.dataset = None
    assert len(pickle.dumps(first)) < 2000 * 24


ERRORS: dict[str, tuple[Any, str]] = {
    "too long": (lambda: Packed(texts([3, 9, 12]), 8), "2 of 3 documents are longer than .* 8 tokens, the longest .*2\\) has 12.*overflow='split'"),
    "overflow": (lambda: Packed(texts([3]), 8, overflow="cut"), "overflow='cut'.*'split', 'truncate', 'drop'"),
    "length": (lambda: Packed(texts([3]), 0), "length=0"),
    "no int": (lambda: Packed(texts([3]), [5]), "the number of tokens in a row"),
    "no length": (lambda: Packed(texts([3]), "8"), "length='8'\\): give an int"),
    "seed": (lambda: Packed(texts([3]), 8, seed="x"), "seed='x'\\): give an int"),
    "pad": (lambda: Packed(texts([3]), 8, pad="x"), "pad='x'\\): give an int, a token"),
    "negative pad": (lambda: PackedStream(Stream([]), 8, pad=-1), "pad=-1\\): must be at least 0"),
    "key": (lambda: Packed(texts([3]), 8, key=None), "key=None\\): give the name of the column"),
    "a column of lists": (lambda: Packed(texts([3]), 8, lengths="n"), "lengths='n'\\) names a column, and the data set has samples of type list"),
    "no column": (lambda: Packed([{"input_ids": [1]}], 8, lengths="n"), "the data set has the columns input_ids: give the name of one"),
    "lengths that are a number": (lambda: Packed(texts([3]), 8, lengths=3), "lengths is 3 .int.: give a sequence of whole numbers"),
    "lengths without an order": (lambda: Packed(texts([3]), 8, lengths={3}), "not in the order of the samples"),
    "huge lengths": (lambda: Packed(texts([3]), 8, lengths=[10**30]), "not numbers, or too large"),
    "a text as data": (lambda: Packed("text", 8), "packs documents, and got str"),
    "negative tokens": (lambda: Packed([[3, -4]], 8)[0], "has the token -4, and tokens are 0 or more"),
    "negative in a stream": (lambda: next(iter(PackedStream(iter([[3, -4]]), 8))), "has the token -4"),
    "huge in a stream": (lambda: next(iter(PackedStream(iter([[3, 2**32 + 1]]), 8))), "has the token 4294967297, and open rows keep"),
    "positions that are none": (lambda: document_lengths(None), "position_ids is NoneType: give the tensor"),
    "numbers that are floats": (lambda: document_mask(torch.zeros(1, 3)), "dtype torch.float32: give whole numbers"),
    "empty": (lambda: Packed(texts([0, 0]), 8), "none of the 2 documents has a token"),
    "nothing": (lambda: Packed([], 8), "none of the 0 documents has a token"),
    "a stream": (lambda: Packed(Stream([]), 8), "PackedStream\\(dataset, length=8\\)"),
    "a generator": (lambda: Packed((text for text in texts([3])), 8), "PackedStream"),
    "a mixture": (lambda: Packed(Mixture({"a": texts([3]), "b": texts([3])}), 8), "mix the packed rows, Mixture\\({'web': Packed"),
    "a tuple": (lambda: Packed(TensorDataset(torch.zeros(3, 5).long()), 8), "document 0 must be a sequence of whole numbers.*shape \\[1, 5\\]"),
    "text": (lambda: Packed(["some words"], 8), "document 0 must be a sequence of whole numbers.*is str"),
    "floats": (lambda: Packed([[0.5, 1.0]], 8), "dtype float64"),
    "another column": (lambda: Packed([{"ids": [1]}], 8), "document 0 has the keys ids, and no 'input_ids'"),
    "padding": (lambda: Packed([{"input_ids": [1, 0], "attention_mask": [1, 0]}], 8), "has padding.*tokenize without padding"),
    "labels": (lambda: Packed([{"input_ids": [1, 2], "labels": [1]}], 8), "2 tokens and 1 labels"),
    "number of lengths": (lambda: Packed(texts([3, 4]), 8, lengths=[3]), "lengths has the shape \\[1\\], and the data set 2 documents"),
    "kind of lengths": (lambda: Packed(texts([3]), 8, lengths=[0.5]), "dtype float64"),
    "negative": (lambda: Packed(texts([3]), 8, lengths=[-3]), "negative length, -3"),
    "other lengths": (lambda: Packed(texts([3, 4]), 8, lengths=[3, 3])[0], "document 1 of Packed has 4 tokens, and lengths says 3"),
    "a list as a stream": (lambda: PackedStream(texts([3]), 8), "Packed\\(dataset, length=8\\)"),
    "bins": (lambda: PackedStream(Stream([]), 8, bins=0), "bins=0"),
    "long in a stream": (lambda: list(PackedStream(Stream(texts([9])), 8)), "a document of 9 tokens is longer than a row of 8.*overflow='split'"),
    "no document in a stream": (lambda: list(PackedStream(Stream(["words"]), 8)), "document 0 of this pass must be a sequence"),
    "lengths of positions": (lambda: document_lengths(torch.zeros(1, 2, 3)), "shape \\[1, 2, 3\\]"),
    "numbers of documents": (lambda: document_mask(torch.zeros(3)), "shape \\[3\\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_an_error_that_says_what_to_do(case: str) -> None:
    attempt, message = ERRORS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        attempt()


def test_rows_beyond_the_last_are_an_index_error() -> None:
    rows = Packed(texts([3, 4]), 8)
    with pytest.raises(IndexError):
        rows[1]


def test_a_state_of_other_rows_is_an_error() -> None:
    stream = PackedStream(Stream(texts([3])), 8)
    with pytest.raises(
        ValueError, match=r"PackedStream\(length=16\) is to continue from a state with rows of 8 tokens"
    ):
        PackedStream(Stream(texts([3])), 16).load_state_dict(stream.state_dict())


def test_a_pass_that_is_ended_early_leaves_its_open_rows_out() -> None:
    class Again(Stream):
        def __iter__(self) -> Iterator[Any]:
            self.at = 0
            return super().__iter__()

    stream = PackedStream(Again(texts([3, 4, 5, 6])), 8)
    whole = [documents_in(row) for row in stream]
    next(iter(stream))
    assert [documents_in(row) for row in stream] == whole
    assert not hasattr(PackedStream(iter(texts([3])), 8), "state_dict")


# -- what keeps documents apart ------------------------------------------------------------------------------------------------


def test_a_mask_lets_each_token_see_its_own_document_only() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 1, 1, 2, 2, 2]])
    dense = document_mask(numbers, dense=True)
    block = document_mask(numbers)
    for row, query, key in numpy.ndindex(2, 6, 6):
        sees = bool(numbers[row, query] == numbers[row, key]) and key <= query
        assert bool(dense[row, 0, query, key]) is sees
        indices = [torch.tensor(index) for index in (row, 0, query, key)]
        assert bool(block.mask_mod(*indices)) is sees
    both = document_mask(numbers, causal=False, dense=True)
    assert bool(both[0, 0, 0, 2])
    assert not both[0, 0, 0, 3]


def test_lengths_are_those_of_the_documents() -> None:
    edges, longest = document_lengths(torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]))
    assert edges.tolist() == [0, 3, 5, 6, 7, 12]
    assert (edges.dtype, longest) == (torch.int32, 5)
    assert document_lengths(torch.tensor([[3, 4, 0], [5, 6, 7]])).cu_seqlens.tolist() == [0, 2, 3, 6]
    assert document_lengths(torch.arange(4)).longest == 4


class Transformer(nn.Module):
    """Two blocks of attention; documents are apart by a mask."""

    def __init__(self, flex: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            parts = qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
            x = x + out(seen.transpose(1, 2).flatten(2))
        return self.head(x)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer()

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        mask = document_mask(batch["document_ids"], dense=True)
        logits = self.model(batch["input_ids"], batch["position_ids"], mask)
        targets = batch["labels"][:, 1:].flatten()
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        return Loss(total, (targets != -100).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def prose(count: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 33, (count,), generator=generator)
    return [torch.randint(1, VOCABULARY, (int(length),), generator=generator) for length in lengths]


def stepped(module: Any, loader: Any, **options: Any) -> list[Tensor]:
    """The weights after one step."""
    Fit(accelerator="cpu", max_steps=1, num_sanity_val_steps=0, check=False, **options).run(module, loader)
    return [parameter.detach() for parameter in module.parameters()]


def one_step() -> list[Tensor]:
    """One step of all documents of :func:`prose` in packed rows, on this job's ranks."""
    rows = Packed(prose(), 32)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(rows, 4)
    window = -(-len(rows) // (4 * world))
    options = {"devices": world, "strategy": "ddp"} if world > 1 else {"devices": 1}
    return stepped(Net(), loader, accumulate_grad_batches=window, **options)


def separately() -> list[Tensor]:
    """The same step from each document alone, in a bare loop."""
    module = Net()
    total, count = torch.zeros(()), 0
    for text in prose():
        seen = torch.ones(1, 1, len(text), len(text)).tril().bool()
        logits = module.model(text[None], torch.arange(len(text))[None], seen)[0, :-1]
        total, count = total + F.cross_entropy(logits, text[1:], reduction="sum"), count + len(text) - 1
    (total / count).backward()
    return [(parameter - 0.5 * parameter.grad).detach() for parameter in module.parameters()]


def check_equal(weights: list[Any]) -> None:
    for found, expected in zip(weights, separately(), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-6, atol=1e-6)


def test_a_step_equals_one_batch_of_separate_documents() -> None:
    check_equal(one_step())


# -- resumed on other numbers of ranks ------------------------------------------------------------------------------------------


class Seen(Callback):
    """The tokens that each step has seen on this rank, padding left out."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        tokens = batch["input_ids"][batch["document_ids"] >= 0]
        self.steps.setdefault(run.step, []).extend(tokens.tolist())


class Plain(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * batch["position_ids"].float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SIZES = torch.randint(1, 30, (150,), generator=torch.Generator().manual_seed(5)).tolist()
KINDS = ("packed", "stream", "budget")
SLOW_KINDS = ("packed workers", "mixed", "joined budget")
STOP, LAST = 5, 17
"""The steps of the first run, and of all: the resume is in the first epoch, and there is a second."""


def padded_batch(samples: list[list[int]]) -> dict[str, Tensor]:
    """Documents as rows that are padded to the longest."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)
    return {"input_ids": tokens, "document_ids": torch.where(tokens > 0, 0, -1), "position_ids": tokens % 10}


def loader_of(kind: str, ranks: int) -> Any:
    if kind.endswith("budget"):
        budget = TokenBudget(SIZES, max_tokens=90, padded=kind == "budget")
        return DataLoader(texts(SIZES), batch_sampler=budget, collate_fn=padded_batch)  # type: ignore[arg-type]
    if kind == "stream":
        return DataLoader(PackedStream(Stream(texts(SIZES)), 48), 2)
    rows: Any = Packed(texts(SIZES), 48)
    if kind == "mixed":
        rows = Mixture({"a": rows, "b": Packed(texts([7] * 40), 48)}, {"a": 0.7, "b": 0.3})
    return DataLoader(rows, 4 // ranks, shuffle=True, num_workers=2 if kind.endswith("workers") else 0)


def train(kind: str, folder: Path, ranks: int, **options: Any) -> tuple[dict[int, list[int]], Any]:
    seen, resume = Seen(), options.pop("resume", None)
    # A stream is read in rounds of one batch a rank: 4 rows a step, too. Of a budget a step has four batches: one for each of four ranks.
    window = 4 // ranks if kind.endswith("budget") else 2 // ranks if kind == "stream" else 1
    fit = resumable_fit(folder, seen, devices=ranks, accumulate_grad_batches=max(1, window), **options)
    result = fit.run(Plain(), loader_of(kind, ranks), resume=resume)
    return seen.steps, result.last_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, dict[int, list[int]]]:
    return {kind: steps_and_checkpoint(kind, folder) for kind in KINDS}


def steps_and_checkpoint(kind: str, folder: Path) -> dict[int, list[int]]:
    """The tokens of each step on one rank. A checkpoint after ``STOP`` steps is named in ``KIND.txt``."""
    steps, _ = train(kind, folder / "whole" / kind, 1, max_steps=LAST)
    _, checkpoint = train(kind, folder / "part" / kind, 1, max_steps=STOP)
    (folder / f"{kind}.txt").write_text(str(checkpoint))
    return steps


@pytest.fixture(scope="module")
def two(folder: Path, undisturbed: Any) -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_", PACKED=str(folder))


def two_step() -> list[Any]:
    return [weights.tolist() for weights in one_step()]


def two_resumed() -> dict[str, Any]:
    return resumed(KINDS)


def two_saved() -> dict[str, str]:
    """Checkpoints of two ranks."""
    folder = Path(os.environ["PACKED"])
    return {kind: str(train(kind, folder / "two" / kind, 2, max_steps=STOP)[1]) for kind in KINDS}


def slow_step() -> list[Any]:
    return two_step()


def slow_resumed() -> dict[str, Any]:
    return resumed((*KINDS[:1], *SLOW_KINDS))


def resumed(kinds: tuple[str, ...]) -> dict[str, Any]:
    folder, ranks = Path(os.environ["PACKED"]), int(os.environ["WORLD_SIZE"])
    return {
        kind: train(
            kind, folder / f"on {ranks}" / kind, ranks, max_steps=LAST, resume=(folder / f"{kind}.txt").read_text()
        )[0]
        for kind in kinds
    }


def together(by_rank: list[dict[Any, list[int]]]) -> dict[int, list[int]]:
    """The tokens of each step on all ranks. A rank without a row in a short step repeats one at weight 0, so each token is listed once."""
    return {int(step): sorted({token for rank in by_rank for token in rank[step]}) for step in by_rank[0]}


def after_stop(steps: dict[int, list[int]]) -> dict[int, list[int]]:
    return {step: sorted(set(tokens)) for step, tokens in steps.items() if step >= STOP}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_on_two_ranks_sees_the_tokens_of_the_undisturbed_run(kind: str, undisturbed: Any, two: Any) -> None:
    assert together([rank[kind] for rank in two["resumed"]]) == after_stop(undisturbed[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_on_one_rank_sees_them_too(kind: str, undisturbed: Any, two: Any, folder: Path) -> None:
    steps, _ = train(kind, folder / "back" / kind, 1, max_steps=LAST, resume=two["saved"][0][kind])
    assert min(steps) == STOP
    assert after_stop(steps) == after_stop(undisturbed[kind])


@pytest.mark.parametrize("stop", [4, 6])
def test_an_epoch_that_is_ended_early_leaves_nothing_to_the_next(stop: int, tmp_path: Path) -> None:
    limited = {"limit_train_batches": 6}  # three steps
    whole, _ = train("stream", tmp_path / "whole", 1, max_steps=9, **limited)
    _, checkpoint = train("stream", tmp_path / "part", 1, max_steps=stop, **limited)
    rest, _ = train("stream", tmp_path / "rest", 1, max_steps=9, resume=checkpoint, **limited)
    assert rest == {step: tokens for step, tokens in whole.items() if step >= stop}


def test_a_step_of_two_ranks_equals_one_batch_of_separate_documents(two: Any) -> None:
    check_equal(two["step"][0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_workers_and_four_ranks(ranks: int, undisturbed: Any, folder: Path) -> None:
    undisturbed = {**undisturbed, **{kind: steps_and_checkpoint(kind, folder) for kind in SLOW_KINDS}}
    job = ranks_of_file(__file__, ranks, "slow_", PACKED=str(folder))
    check_equal(job["step"][0])
    for kind in job["resumed"][0]:
        assert together([rank[kind] for rank in job["resumed"]]) == after_stop(undisturbed[kind]), kind
