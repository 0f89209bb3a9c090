"""``TokenBudget``: every sample in one batch, no batch above the budget, little padding, and the same batches on any number of ranks.

The resumes on other numbers of ranks are in ``test_packing.py``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint
from engine import CombinedLoader, Engine, Fit, Loss, Mixture, Packed, Resume, TokenBudget, TrainModule

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=120)


def tokens_in(batch: list[int], lengths: list[int], padded: bool) -> int:
    sizes = [lengths[sample] for sample in batch]
    return len(batch) * max(sizes) if padded else sum(sizes)


@settings(max_examples=80, deadline=None)
@given(
    LENGTHS, st.integers(40, 200), st.booleans(), st.integers(0, 3), st.sampled_from([None, 1, 7, 1000]), st.booleans()
)
def test_every_sample_is_in_one_batch_within_the_budget(
    lengths: list[int], max_tokens: int, padded: bool, epoch: int, pool: int | None, shuffle: bool
) -> None:
    budget = TokenBudget(lengths, max_tokens, padded=padded, pool=pool, shuffle=shuffle)
    batches = list(budget.draws(epoch))
    assert len(batches) == len(budget)
    assert sorted(sample for batch in batches for sample in batch) == list(range(len(lengths)))
    assert all(batches)
    assert max(tokens_in(batch, lengths, padded) for batch in batches) <= max_tokens
    assert budget.draws(epoch)[:2] == batches[:2]
    assert budget.draws(epoch)[-1] == batches[-1]
    assert [budget.draws(epoch).size_of(number) for number in range(len(batches))] == list(map(len, batches))


def functions() -> Any:
    """Lengths with a long tail, as those of functions of a program."""
    lengths = numpy.random.default_rng(0).lognormal(3.9, 1, 58_720).astype(numpy.int64) + 1
    return numpy.minimum(lengths, 4911)


def test_padding_is_small_and_ranks_have_equal_work() -> None:
    lengths = functions()
    for padded in (True, False):
        batches = list(TokenBudget(lengths, 16_384, padded=padded).draws(3))
        tokens = numpy.array([tokens_in(batch, lengths, padded) for batch in batches])
        assert 1 - lengths.sum() / tokens.sum() <= (0.06 if padded else 0)
        assert tokens.mean() >= 0.97 * 16_384
        rounds = tokens[: len(tokens) // 8 * 8].reshape(-1, 8)
        assert rounds.max(1).mean() <= 1.03 * rounds.mean()


def test_epochs_and_seeds_have_other_batches_of_the_same_number() -> None:
    lengths = functions()[:2000]
    for padded in (True, False):
        budget = TokenBudget(lengths, 2000 if padded else 5000, padded=padded)
        epochs = [*(list(budget.draws(epoch)) for epoch in range(3)), list(budget.seeded(1, True).draws(0))]
        assert {len(batches) for batches in epochs} == {len(budget)}
        for batches, others in pairwise(epochs):
            common = {frozenset(batch) for batch in batches} & {frozenset(batch) for batch in others}
            assert len(common) < 0.3 * len(budget)
        assert list(budget.seeded(0, True).draws(2)) == epochs[2]


def test_without_a_shuffle_the_longest_come_first() -> None:
    budget = TokenBudget([3, 9, 1, 5, 5], 10, shuffle=False)
    assert list(budget) == list(budget.draws(4)) == [[1], [3, 4], [0, 2]]


def test_a_plain_loader_reads_the_batches_of_its_epoch() -> None:
    budget = TokenBudget([2] * 40, 8)
    loader: Any = DataLoader(range(40), batch_sampler=budget)  # type: ignore[arg-type]
    first = [batch.tolist() for batch in loader]
    budget.set_epoch(1)
    assert first == list(budget.draws(0)) != [batch.tolist() for batch in loader] == list(budget.draws(1))
    assert len(loader) == 10


class Texts:
    """Samples that are tensors of unequal lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), index + 1.0)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Mean(TrainModule):
    """The mean of all tokens pulls at a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch["a"] if isinstance(batch, dict) else batch
        self.seen += (batch[:, 0] - 1).int().tolist()
        return Loss((self.weight * batch).sum(), (batch > 0).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


SIZES = [1, 7, 3, 3, 10, 2, 2, 9]


def loader(**options: Any) -> Any:
    return DataLoader(Texts(SIZES), batch_sampler=TokenBudget(SIZES, 10), collate_fn=padded, **options)  # type: ignore[arg-type]


def test_each_token_has_the_same_weight_in_a_step() -> None:
    module, data = Mean(), loader()
    options: dict[str, Any] = {"accelerator": "cpu", "check": False, "num_sanity_val_steps": 0}
    Fit(max_epochs=1, accumulate_grad_batches=len(data), **options).run(module, data)
    expected = sum((index + 1) * size for index, size in enumerate(SIZES)) / sum(SIZES)
    assert module.weight.item() == pytest.approx(-expected)
    assert sorted(module.seen) == list(range(8))


def test_an_engine_and_a_combination_read_the_same_batches() -> None:
    seeded: Any = Engine(accelerator="cpu", seed=5).prepare(loader())
    expected = TokenBudget(SIZES, 10).seeded(5, True)
    for epoch in range(2):
        batches = [(batch[:, 0] - 1).int().tolist() for batch in seeded]
        assert batches == list(expected.draws(epoch))
    module = Mean()
    combined = CombinedLoader({"a": loader(), "b": loader()})
    Fit(accelerator="cpu", max_epochs=1, check=False).run(module, combined)
    assert sorted(module.seen) == list(range(8))


def prepared(dataset: Any, budget: TokenBudget) -> Any:
    return Engine(accelerator="cpu").prepare(DataLoader(dataset, batch_sampler=budget))


BAD: dict[str, tuple[Any, str]] = {
    "a long sample": (lambda: TokenBudget([3, 11, 12], 10), "2 of 3 samples are longer, the longest .sample 2. has 12 tokens"),
    "negative": (lambda: TokenBudget([3, -1], 10), "sample 1 has the length -1"),
    "floats": (lambda: TokenBudget([3.0], 10), "dtype float64: give whole numbers"),
    "nothing": (lambda: TokenBudget([], 10), "the shape \\[0\\]"),
    "rows": (lambda: TokenBudget(torch.ones(2, 2).long(), 10), "the shape \\[2, 2\\]"),
    "no budget": (lambda: TokenBudget([3], 0), "max_tokens=0.: must be at least 1"),
    "a text": (lambda: TokenBudget([3], "10 tokens"), "max_tokens='10 tokens'.: give an int"),  # type: ignore[arg-type]
    "None": (lambda: TokenBudget(None, 5), "lengths is None .NoneType.: give a sequence of whole numbers"),
    "a dict": (lambda: TokenBudget({"a": 3}, 5), "not in the order of the samples"),
    "ragged": (lambda: TokenBudget([[1], [1, 2]], 5), "give a sequence of whole numbers"),
    "a flag": (lambda: TokenBudget([3], 5, padded="no"), "padded='no'.: give True or False"),  # type: ignore[arg-type]
    "an epoch": (lambda: TokenBudget([3], 5).set_epoch(1.5), r"set_epoch\(1.5\): give an int"),  # type: ignore[arg-type]
    "pool": (lambda: TokenBudget([3], 10, pool=0), "pool=0"),
    "other data": (lambda: prepared(Texts([1, 2]), TokenBudget([1], 10)), "has the lengths of 1 samples, and Texts has 2"),
    "a mixture": (lambda: prepared(Mixture({"a": Texts([1]), "b": Texts([2])}), TokenBudget([1, 2], 10)), "Mixture decides itself which"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_that_says_what_to_do(case: str) -> None:
    attempt, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message):
        attempt()


@pytest.mark.parametrize(("tokens", "steps"), [("10 tokens", 6), ("20 tokens", 3), ("40 tokens", 2)])
def test_a_step_has_a_number_of_tokens(tokens: str, steps: int) -> None:
    assert len(TokenBudget(SIZES, 10)) == 6
    assert (
        Fit(accelerator="cpu", max_epochs=1, global_batch_size=tokens, check=False).run(Mean(), loader()).step == steps
    )


STEPS: dict[Any, str] = {
    "25 tokens": "batches of at most 10 tokens on 1 rank.* nearest possible: 20 tokens, 30 tokens",
    8: "different numbers of samples: give the tokens of a step, global_batch_size='10 tokens'",
}


@pytest.mark.parametrize("size", STEPS)
def test_a_step_that_is_not_of_whole_batches_is_an_error(size: Any) -> None:
    with pytest.raises(ValueError, match=STEPS[size]):
        Fit(accelerator="cpu", max_epochs=1, global_batch_size=size, check=False).run(Mean(), loader())


OTHER_SIZES = [7, 1, *SIZES[2:]]


def budget_loader(sizes: list[int] = SIZES, **options: Any) -> Any:
    return DataLoader(Texts(sizes), batch_sampler=TokenBudget(sizes, 10, **options), collate_fn=padded)  # type: ignore[arg-type]


def packed_loader(sizes: list[int] = SIZES, seed: int = 0) -> Any:
    rows = Packed([[index + 1] * size for index, size in enumerate(sizes)], 10, seed=seed)
    return DataLoader(rows, batch_size=1, collate_fn=lambda rows: torch.stack([row["input_ids"] for row in rows]))


PLANS: dict[str, tuple[Any, Any]] = {
    "lengths of a budget": (budget_loader, lambda: budget_loader(OTHER_SIZES)),
    "the pool": (lambda: budget_loader(pool=2), lambda: budget_loader(pool=5)),
    "the order": (lambda: budget_loader(pool=8), lambda: budget_loader(shuffle=False)),
    "lengths of documents": (packed_loader, lambda: packed_loader(OTHER_SIZES)),
    "the seed of rows": (packed_loader, lambda: packed_loader(seed=3)),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_started_epoch_is_finished_with_the_batches_that_it_began_with(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = (create() for create in PLANS[case])
    assert len(before) == len(after) > 2

    def run(data: Any, steps: int, resume: Any = None) -> None:
        saves = ModelCheckpoint(every="1 steps")
        fit = Fit(accelerator="cpu", max_steps=steps, max_epochs=3, check=False, root_dir=tmp_path, callbacks=[saves])
        fit.run(Mean(), data, resume=resume)

    run(before, 2)
    with pytest.raises(ValueError, match=r"packed into other rows or batches .* strict=False"):
        run(after, 3, "last")
    run(before, len(before), "last")  # to the epoch's end
    run(after, len(before) + 1, "last")
    with pytest.raises(ValueError, match="packed into other"):
        run(before, len(before) + 2, "last")
    run(before, len(before) + 2, Resume("last", strict=False))
    assert "packed into other rows or batches" in caplog.text
