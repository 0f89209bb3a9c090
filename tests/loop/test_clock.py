"""The clock of a training in samples and tokens: limits and intervals in these units, and that a resume on other ranks keeps them."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from callbacks import ModelCheckpoint
from engine import (
    Callback,
    CombinedLoader,
    Engine,
    Every,
    Fit,
    Loss,
    Mixture,
    Packed,
    PackedStream,
    Resume,
    TokenBudget,
)

LENGTH = 8
COUNT = 50


class Rows(Dataset[Any]):
    """Rows of one length, which are numbered."""

    tokens_per_sample = LENGTH

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((LENGTH,), row)}


class Texts(Rows):
    """Rows that do not say how long they are."""

    tokens_per_sample = None


LENGTHS = [1 + 7 * row % 13 for row in range(COUNT)]


class Unlike(Texts):
    """Rows of unlike lengths, of which a budget makes batches."""

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((LENGTHS[row],), row)}


def cut_to_one(rows: list[Any]) -> dict[str, Tensor]:
    return {"input_ids": torch.stack([row["input_ids"][:1] for row in rows])}


def packed() -> Packed:
    """44 rows of 8 tokens, all different, which are cut into shorter ones in the first stages."""
    documents = [[100 * row + place for place in range(1, 1 + length)] for row, length in enumerate(LENGTHS)]
    return Packed(documents, {0: 2, "2e2 tokens": 4, "400 tokens": 8}, overflow="split")


def budget_loader() -> DataLoader[Any]:
    return DataLoader(Unlike(), batch_sampler=TokenBudget(LENGTHS, 26, pool=20), collate_fn=cut_to_one)


def tokens_of_batches(seed: int, epochs: int) -> list[int]:
    """The tokens in each batch of :func:`budget_loader`."""
    budget = TokenBudget(LENGTHS, 26, pool=20).seeded(seed, True)
    return [sum(LENGTHS[row] for row in batch) for epoch in range(epochs) for batch in budget.draws(epoch)]


class Tokens(Weight):
    """Notes the rows of each step, and the steps after which it validates. The loss is a ``Loss`` if ``weighted``."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.weighted, self.validated, self.rows = weighted, [], []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        rows = batch["input_ids"]
        self.rows.append((self.global_step, sorted(rows[:, 0].tolist())))
        loss = self.w * rows.float() * 1e-4
        return Loss(loss.sum(), loss.numel()) if self.weighted else loss.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        return None

    def on_validation_start(self) -> None:
        self.validated.append(self.global_step)


class Counts(Callback):
    """Notes samples and tokens of the clock after each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not run.state.in_window:
            self.seen.append([run.step, run.clock.samples, run.clock.tokens])


def loader(data: Any = None, batch_size: int = 4, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Rows() if data is None else data, batch_size=batch_size, **{"shuffle": True, **settings})


@pytest.mark.parametrize(
    ("length", "others", "reason", "step"),
    [  # 50 rows in batches of 4: 13 steps an epoch, the last one of 2 rows
        ("1e3 tokens", {}, "max_duration=1000 tokens reached", 33),  # 125 rows: two epochs and 25 rows
        ("400 tokens", {}, "max_duration=400 tokens reached", 13),
        ("401 tokens", {}, "max_duration=401 tokens reached", 14),
        ("1_25 samples", {}, "max_duration=125 samples reached", 33),
        ("1e3 tokens", {"max_steps": 30}, "max_steps=30 reached", 30),
        ("1e3 tokens", {"max_epochs": 2}, "max_epochs=2 reached", 26),
        (
            "1e3 tokens",
            {"max_epochs": 3, "accumulate_grad_batches": {0: 1, 1: 2}},
            "max_duration=1000 tokens reached",
            24,
        ),
        ("40 samples", {"limit_train_batches": 3}, "max_duration=40 samples reached", 10),
        ("1.5 epochs", {}, "max_duration=1.5 epochs reached", 20),
        ("2 epochs", {"max_epochs": 3}, "max_epochs=2 reached", 26),
        (7, {}, "max_steps=7 reached", 7),
        ("1 h", {"max_steps": 2}, "max_steps=2 reached", 2),
        ("80 samples", {"fast_dev_run": 1}, "max_epochs=1 reached", 1),
    ],
)
def test_the_first_limit_ends_a_training(tmp_path: Path, length: Any, others: Any, reason: str, step: int) -> None:
    class Total(Tokens):
        total: int | None = None

        def configure_optimizers(self) -> Any:
            self.total = self.run.total_steps
            return super().configure_optimizers()

    module = Total()
    result = fit(tmp_path, max_duration=length, **others).run(module, loader())
    assert (result.status, result.stop_reason, result.step) == ("completed", reason, step)
    assert module.total == step


def test_a_limit_of_time_stops_a_training(tmp_path: Path) -> None:
    result = fit(tmp_path, max_duration="1e-9 s", max_time="1 h").run(Tokens(), loader())
    assert (result.status, result.stop_reason) == ("stopped", "max_time=1e-09 seconds reached")


def test_a_part_of_an_epoch_needs_its_length(tmp_path: Path) -> None:
    module = Tokens()
    with pytest.raises(ValueError, match=r"max_duration='0\.5 epochs': the length of an epoch is unknown"):
        fit(tmp_path, max_duration=0.5).run(module, loader(Stream(), shuffle=False))
    assert module.w.item() == 0.0


def test_intervals_count_what_was_read(tmp_path: Path) -> None:
    class SkipsSome(Tokens):
        """Its third to fifth step have gradients that are not finite: 12 rows."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if 2 <= batch_idx < 5 and self.current_epoch == 0 else loss

    module, plain = SkipsSome(), Tokens()
    for trained in (module, plain):
        settings: dict[str, Any] = {"max_duration": "100 samples", "val_every": "240 tokens", "on_nonfinite": "skip"}
        fit(tmp_path, **settings).run(trained, loader(), [{"input_ids": torch.ones(2, 1)}])
    # 30, 60 and 90 rows are reached with windows 8, 16 (the 13th has 2 rows) and 23.
    assert plain.validated == [8, 16, 23]
    assert module.validated == [5, 13, 20]


@pytest.mark.filterwarnings("ignore:LeavesOut.training_step returned None")
@pytest.mark.parametrize("kind", ["steps without a loss", "no steps yet"])
def test_windows_without_a_step_count(tmp_path: Path, kind: str) -> None:
    class LeavesOut(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            left_out = batch_idx % 2 if kind == "steps without a loss" else batch_idx < 4
            return None if left_out else loss

    result = fit(tmp_path, max_duration="32 samples").run(LeavesOut(), loader())
    assert (result.stop_reason, result.step) == ("max_duration=32 samples reached", 4)


def test_tokens_that_losses_count_act_at_log_boundaries(tmp_path: Path) -> None:
    module = Tokens(weighted=True)
    result = fit(tmp_path, max_duration="500 tokens", val_every="200 tokens", log_every_n_steps=5).run(
        module, loader(Texts()), [{"input_ids": torch.ones(2, 1)}]
    )
    # A step has 32 tokens: 160 at step 5, 320 at 10, 464 at 15 (one had two rows), 624 at 20.
    assert (result.step, module.validated) == (20, [10, 15, 20])


@pytest.mark.parametrize("others", [{}, {"accumulate_grad_batches": 2}, {"limit_train_batches": 5}])
def test_a_budget_knows_the_tokens_of_each_step(tmp_path: Path, others: dict[str, Any]) -> None:
    """Nothing waits for a log boundary: by default there is one every 50 steps."""
    in_epoch, window = len(TokenBudget(LENGTHS, 26, pool=20)), others.get("accumulate_grad_batches", 1)
    used, tokens = others.get("limit_train_batches", in_epoch), tokens_of_batches(4, 12)
    steps = [
        sum(tokens[epoch * in_epoch + at : epoch * in_epoch + min(at + window, used)])
        for epoch in range(12)
        for at in range(0, used, window)
    ]
    done = list(itertools.accumulate(steps))

    def step_of(amount: int) -> int:
        return next(step for step, count in enumerate(done, 1) if count >= amount)

    class Total(Tokens):
        def configure_optimizers(self) -> Any:
            self.total = self.run.total_steps
            return super().configure_optimizers()

    for most in (403, done[-1] // 4, sum(LENGTHS), 2 * sum(LENGTHS)):
        module, counts, saves = Total(), Counts(), ModelCheckpoint(every="150 tokens", save_top_k=-1)
        result = fit(
            tmp_path / str(most), seed=4, max_duration=f"{most} tokens", val_every="100 tokens", callbacks=[counts, saves],
            log_every_n_steps=50, **others,
        ).run(module, budget_loader(), [{"input_ids": torch.ones(2, 1)}])  # fmt: skip
        assert (result.stop_reason, result.step) == (f"max_duration={most} tokens reached", step_of(most))
        assert [tokens for _, _, tokens in counts.seen] == done[: result.step]
        assert module.validated == sorted({step_of(amount) for amount in range(100, done[result.step - 1] + 1, 100)})
        at_intervals = {step_of(amount) for amount in range(150, done[result.step - 1] + 1, 150)}
        assert sorted(saves.scores) == sorted({*at_intervals, result.step})
        assert module.total == (None if "limit_train_batches" in others else result.step)


def test_stages_and_rates_follow_the_tokens_of_a_budget(tmp_path: Path) -> None:
    stages = {0: "26 tokens", "150 tokens": "52 tokens", "800 tokens": "26 tokens"}
    module, counts = Rates(), Counts()
    result = fit(tmp_path, seed=4, global_batch_size=stages, max_duration="1e3 tokens", callbacks=[counts]).run(
        module, budget_loader()
    )
    batches, in_epoch = tokens_of_batches(4, 5), len(TokenBudget(LENGTHS, 26, pool=20))
    done, at, expected = 0, 0, []
    while done < 1000:
        size = 2 if 150 <= done < 800 else 1
        size = min(size, in_epoch - at % in_epoch)  # an epoch's last step
        done, at = done + sum(batches[at : at + size]), at + size
        expected.append(done)
    assert [tokens for _, _, tokens in counts.seen] == expected
    assert module.total == result.step == len(expected)
    assert module.rates == {tokens: rate(tokens) for tokens in module.rates}


@pytest.mark.parametrize(
    "others", [{}, {"max_epochs": 3}, {"max_epochs": 9, "limit_train_batches": 7}, {"max_duration": "77 samples"}]
)
def test_stages_may_follow_the_samples_of_a_budget(tmp_path: Path, others: dict[str, Any]) -> None:
    stages = {0: "26 tokens", "20 samples": "52 tokens", "61 samples": "26 tokens"}
    module, counts = Rates(), Counts()
    settings: dict[str, Any] = others or {"max_duration": "300 tokens"}
    result = fit(tmp_path, seed=4, global_batch_size=stages, callbacks=[counts], **settings).run(
        module, budget_loader()
    )
    budget = TokenBudget(LENGTHS, 26, pool=20).seeded(4, True)
    used, done, tokens, expected = settings.get("limit_train_batches", len(budget)), 0, 0, []
    for epoch in range(settings.get("max_epochs", 9)):
        batches, at = list(budget.draws(epoch))[:used], 0
        while at < used and (tokens < 300 or others) and (done < 77 or "max_duration" not in others):
            size = 2 if 20 <= done < 61 else 1
            rows = [row for batch in batches[at : at + size] for row in batch]
            done, at, tokens = done + len(rows), at + size, tokens + sum(LENGTHS[row] for row in rows)
            expected.append(done)
    assert [samples for _, samples, _ in counts.seen] == expected
    assert module.total == result.step == len(expected)


def test_a_length_in_samples_of_a_budget_is_known_in_steps(tmp_path: Path) -> None:
    module = Rates()
    result = fit(tmp_path, max_duration="77 samples", accumulate_grad_batches=2).run(module, budget_loader())
    assert module.total == result.step


def refusal(root: Path, data: Any, module: Any = None, **settings: Any) -> str:
    module = module or Tokens()
    with pytest.raises(ValueError, match="token") as error:
        fit(root, **{"max_duration": "500 tokens", **settings}).run(module, data)
    assert module.w.item() == 0.0  # before the first step
    return str(error.value)


def test_unknown_tokens_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    message = refusal(tmp_path, loader(Texts()))
    assert message.startswith(
        "max_duration='500 tokens': the tokens of the training are not known: Texts has no tokens_per_sample"
    )
    assert "Return Loss(sum, count)" in message
    message = refusal(tmp_path, loader(Texts()), Tokens(weighted=True), log_every_n_steps=0)
    assert "log_every_n_steps=0 has none" in message
    every = ModelCheckpoint(every="200 tokens")
    message = refusal(tmp_path, loader(Texts()), max_duration=None, max_epochs=1, callbacks=[every])
    assert message.startswith("ModelCheckpoint(every=...)='200 tokens'")

    def cut(rows: list[Any]) -> dict[str, Tensor]:
        return {"input_ids": torch.stack([row["input_ids"][:5] for row in rows])}

    assert "a batch has input_ids of shape [4, 5]" in refusal(tmp_path, loader(collate_fn=cut))
    unlike = ConcatDataset([Rows(), type("Long", (Rows,), {"tokens_per_sample": 16})()])
    assert "ConcatDataset has no tokens_per_sample" in refusal(tmp_path, loader(unlike))
    wrong = type("Wrong", (Rows,), {"tokens_per_sample": 0})()
    assert "Wrong.tokens_per_sample=0 must be an int of at least 1" in refusal(tmp_path, loader(wrong))


def test_rows_are_cut_to_the_length_of_their_stage(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    class Sees(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    data = packed()
    fit(tmp_path, seed=2, max_epochs=2, accumulate_grad_batches=2).run(
        Sees(), DataLoader(data, batch_size=2, shuffle=True)
    )
    plain: Any = Engine(accelerator="cpu", seed=2).prepare(
        DataLoader(Packed(data.dataset, 8, overflow="split"), batch_size=2, shuffle=True)
    )
    rows_of_run = [batch for _ in range(2) for batch in plain]
    assert len(rows_of_run) == len(seen)
    tokens, windows = 0, []
    for number, (cut, row) in enumerate(zip(seen, rows_of_run, strict=True)):
        if number % len(plain) % 2 == 0:  # a window begins
            length = 2 if tokens < 200 else 4 if tokens < 400 else 8
            windows.append(length)
        assert cut["input_ids"].shape == (len(row["input_ids"]) * 8 // length, length)
        assert torch.equal(cut["input_ids"].reshape(-1, 8), row["input_ids"])
        for fields in zip(
            *(cut[name].tolist() for name in ("input_ids", "labels", "position_ids", "document_ids")), strict=True
        ):
            position, document, last = -1, -1, None
            for token, label, place, owner in zip(*fields, strict=True):
                if owner == -1:
                    assert (token, label, place) == (0, -100, 0)
                    continue
                begins = last is None or token // 100 != last // 100 or token != last + 1
                position, document, last = (0 if begins else position + 1), document + begins, token
                assert (label, place, owner) == (-100 if begins else token, position, document)
        if number % len(plain) % 2 or number % len(plain) == len(plain) - 1:
            tokens = 8 * sum(len(done["input_ids"]) for done in rows_of_run[: number + 1])
    assert windows == sorted(windows)
    assert set(windows) == {2, 4, 8}


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ({0: 3, "5 steps": 8}, "rows of 8 tokens cannot be cut into parts of 3; nearest possible: 2, 4"),
        ({0: 4, 7: 8}, "the start 7 has no unit"),
        ({"5 steps": 8}, "add a start of 0"),
        ({0: 4, "5 s": 8}, "starts in a time are others in each run"),
        ({0: 4, "5 steps": "8"}, "give an int, the number of tokens in a row"),
        ({}, "add a start of 0"),
    ],
)
def test_lengths_that_are_not_possible(length: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Packed([[1, 2, 3]], length)


def test_a_schedule_of_lengths_is_refused_where_it_cannot_hold(tmp_path: Path) -> None:
    one = Packed(packed().dataset, 8, overflow="split")
    attempts: dict[str, Any] = {
        "which a loop of your own does not have": lambda: next(
            iter(Engine(accelerator="cpu").prepare(loader(packed())))
        ),
        "this is validation data: give it one length": lambda: fit(tmp_path, max_steps=2).run(
            Tokens(), loader(one), loader(packed())
        ),
        "another part of the training's data has one length": lambda: fit(tmp_path, max_steps=2).run(
            Tokens(), loader(Mixture({"a": packed(), "b": one}))
        ),
        "cannot be read beside other loaders": lambda: fit(tmp_path, max_steps=2).run(
            Tokens(), CombinedLoader([loader(packed())] * 2)
        ),
        r"cuts batches of shape \[rows, 8\], and a batch has no tensor input_ids": lambda: fit(
            tmp_path, max_steps=2
        ).run(Tokens(), loader(packed(), collate_fn=lambda rows: [row["input_ids"] for row in rows])),
        r"PackedStream\(length=\{0: 8\}\): give an int": lambda: PackedStream(Stream(), {0: 8}),  # type: ignore[arg-type]
    }
    for message, attempt in attempts.items():
        with pytest.raises((ValueError, TypeError), match=message):
            attempt()


class Stream(IterableDataset[Any]):
    tokens_per_sample = LENGTH

    def __iter__(self) -> Any:
        return (Rows()[row] for row in range(COUNT))


class Counted(Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return COUNT


@pytest.mark.filterwarnings("ignore:this data cannot be read from the middle")
def test_the_number_of_steps_is_refused_where_stages_begin_at_unknown_ones(tmp_path: Path) -> None:
    """A schedule of the first stage's number of steps would be wrong. A training that does not ask goes on."""
    stages = {0: 4, "20 samples": 8}
    with pytest.raises(ValueError, match="a stage from 20 samples, and at which step DataLoader reaches that"):
        fit(tmp_path, global_batch_size=stages, max_epochs=2).run(Rates(), loader(Counted(), shuffle=False))
    known = Rates()
    result = fit(tmp_path, global_batch_size={0: 4, "5 steps": 8}, max_epochs=2).run(
        known, loader(Counted(), shuffle=False)
    )
    # 50 rows: 5 steps of 4, then 4 of up to 8; in the second epoch 7 of up to 8.
    assert known.total == result.step == 16
    assert (
        fit(tmp_path, global_batch_size=stages, max_epochs=2).run(Tokens(), loader(Counted(), shuffle=False)).step == 16
    )


def test_the_length_of_rows_is_found_in_any_loader(tmp_path: Path) -> None:
    parts = Subset(Rows(), range(40)), ConcatDataset([Rows(), Rows()])
    data: list[Any] = [loader(part) for part in parts]
    data += [loader(Stream(), shuffle=False), CombinedLoader([loader(), loader(batch_size=2)], "sequential")]
    for each in data:
        result = fit(tmp_path, max_duration="250 tokens").run(Tokens(), each)
        assert (result.stop_reason, result.step) == ("max_duration=250 tokens reached", 8)


def test_a_guess_is_no_count(tmp_path: Path) -> None:
    class Guessed(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.w.sum()

    batches = [{"a": torch.ones(2, 3), "b": torch.ones(5, 3)}] * 4
    module = Guessed()
    with pytest.raises(ValueError, match="max_duration='6 samples': how many samples a batch has is not certain"):
        fit(tmp_path, max_duration="6 samples").run(module, batches)
    assert module.w.item() == 0.0


STAGES = {0: 4, "160 tokens": 8, "560 tokens": "128 tokens", "1040 tokens": 4}
SIZES = [4] * 5 + [8, 8, 8, 6, 8, 8, 8, 16, 10, 16, 16, 4, 4, 4, 4, 2] + ([4] * 12 + [2])
"""Rows of the steps of four epochs with :data:`STAGES`: they begin at 20, 70 and 130 rows, and the last step of an epoch has what is left."""


def rate(tokens: int) -> float:
    return 1 / (1 + tokens)


class Rates(Tokens):
    """Its rate is a function of the tokens; it notes the rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates[self.run.clock.tokens] = self.optimizers().param_groups[0]["lr"]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        self.total = self.run.total_steps
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "tokens"}}


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "known": (Tokens, Rows, {"global_batch_size": "32 tokens"}),
    "counted": (lambda: Tokens(weighted=True), Texts, {"global_batch_size": 4}),
    "stages": (Rates, Rows, {"global_batch_size": STAGES, "max_duration": "4 epochs"}),
    "lengths": (Tokens, packed, {"max_duration": "6e2 tokens", "global_batch_size": 4}),
    "budget": (
        Rates,
        Unlike,
        {"global_batch_size": {0: "52 tokens", "2e2 tokens": "104 tokens"}, "max_duration": "1500 tokens"},
    ),
}
CUT = 14


def trained(root: Path, case: str, resume: Any = None, **settings: Any) -> Any:
    """What happened in a training on as many ranks as the job has."""
    make, data, own = CASES[case]
    module, counts = make(), Counts()
    saves = ModelCheckpoint(every="200 tokens", save_top_k=-1)
    Fit(
        **{
            "accelerator": "cpu", "devices": "auto", "num_sanity_val_steps": 0, "root_dir": root, "seed": 3, "log_every_n_steps": 3,
            "max_duration": "1e3 tokens", "val_every": "304 tokens", "callbacks": [counts, saves], **own, **settings,
        }
    ).run(module, budget_loader() if data is Unlike else loader(data(), batch_size=2), [{"input_ids": torch.ones(2, 1)}], resume=resume)  # fmt: skip
    return {
        "seen": counts.seen,
        "rows": module.rows,
        "rates": list(getattr(module, "rates", {}).items()),
        "validated": module.validated,
        "saved": sorted(saves.scores),
    }


def rank_continues(root: str) -> Any:
    return {case: trained(Path(root) / case / "again", case, str(Path(root) / case / "checkpoints")) for case in CASES}


def by_step(ranks: list[Any]) -> dict[int, list[int]]:
    """By step, the rows of all ranks."""
    steps: dict[int, list[int]] = {}
    for rank in ranks:
        for step, rows in rank["rows"]:
            steps[step] = sorted([*steps.get(step, []), *rows])
    return steps


def test_a_resume_on_other_ranks_keeps_the_clock(tmp_path: Path) -> None:
    whole = {case: trained(tmp_path / f"{case}_whole", case) for case in CASES}
    for case in CASES:
        trained(tmp_path / case, case, max_steps=CUT)
    continued = ranks_of(rank_continues, 2, tmp_path)
    for case, one in whole.items():
        at_ends = {step: (samples, tokens) for step, samples, tokens in one["seen"]}
        rows = {step: sorted({*rows}) for step, rows in by_step([one]).items() if step >= CUT}
        # A rank without a batch in a short step repeats one at weight 0.
        assert {step: sorted({*rows}) for step, rows in by_step([rank[case] for rank in continued]).items()} == rows
        for rank in continued:
            two = rank[case]
            assert {step: (samples, tokens) for step, samples, tokens in two["seen"] if step > CUT} == {
                step: at for step, at in at_ends.items() if step > CUT
            }
            for name in ("validated", "saved"):
                assert [step for step in two[name] if step > CUT] == [step for step in one[name] if step > CUT]
            assert [list(pair) for pair in one["rates"]][-len(two["rates"]) :] == two["rates"]
    # 38, 76 and 114 rows; the limit of 125 at step 33. Losses are read at every third step.
    assert whole["known"]["validated"] == [10, 20, 30]
    assert whole["known"]["saved"] == [7, 13, 20, 26, 33]
    assert whole["counted"]["validated"] == [12, 21, 30]
    assert whole["counted"]["saved"][-1] == 33
    assert [len(rows) for rows in by_step([whole["stages"]]).values()] == SIZES
    assert all(found == rate(tokens) for tokens, found in whole["stages"]["rates"])


@pytest.mark.parametrize(
    ("sizes", "length", "steps"),
    [
        (STAGES, "4 epochs", len(SIZES)),
        ({0: 4, "20 samples": 8, "70 samples": 16, "130 samples": 4}, "150 samples", 21),
        (
            {0: 4, "0.5 epochs": 8, "2 epochs": 16},
            "1e3 tokens",
            19,
        ),  # 28 rows, then 2, 8, ... and 125 rows after two windows of 16
        ({0: 4, "5 steps": 8, "12 steps": 16}, "180 samples", 20),
        ("64 tokens", "1e3 tokens", 18),  # 7 steps an epoch, and 25 rows
    ],
)
def test_stages_of_batch_sizes(tmp_path: Path, sizes: Any, length: str, steps: int) -> None:
    module = Rates()
    result = fit(tmp_path, global_batch_size=sizes, max_duration=length).run(module, loader(batch_size=2))
    assert result.step == module.total == steps


def test_stages_in_steps_count_steps_that_were_applied(tmp_path: Path) -> None:
    class Skips(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if 2 <= batch_idx < 4 else loss

    module = Skips()
    sizes = {0: 4, "3 steps": 8}
    fit(tmp_path, global_batch_size=sizes, max_epochs=1, on_nonfinite="skip").run(module, loader())
    assert [len(rows) for rows in by_step([{"rows": module.rows}]).values()] == [
        4,
        4,
        12,
        8,
        8,
        8,
        6,
    ]  # two are skipped


def test_stages_in_other_data(tmp_path: Path) -> None:
    data: list[Any] = [
        loader(Stream(), shuffle=False, num_workers=1),
        CombinedLoader([loader(batch_size=2)] * 2, "max_size"),
    ]
    for each in data:
        counts = Counts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stream without a state is read again
            fit(tmp_path, global_batch_size={0: 4, "160 tokens": 8}, callbacks=[counts]).run(Pairs(), each)
        samples = [0, *(at for _, at, _ in counts.seen)]
        sizes = [after - before for before, after in itertools.pairwise(samples) if after > before]
        assert sizes[:8] == [4, 4, 4, 4, 4, 8, 8, 8]
        assert sum(sizes) in (50, 100)


class Pairs(Weight):
    """Takes batches of any form."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w.sum()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({0: 4, 7: 8}, "the start 7 has no unit: give one, as in '7 samples'"),
        ({"1 steps": 4}, "no stage starts at 0, so nothing holds"),
        ({0: 4, "5 s": 8}, "starts in a time are others in each run"),
        ({0: 4, "5 steps": 8, "20 samples": 16}, "starts in samples and steps cannot be ordered"),
        ({0: 4, "0 samples": 8}, "two stages start at the same time"),
        ({0: 4, "20 samples": 6}, "global_batch_size=6 from 20 samples cannot be divided into batches of 4"),
        ({0: 4, "20 samples": 0}, "is not possible: give an int of at least 1"),
        (
            "60 tokens",
            "global_batch_size=60 tokens cannot be divided into rows of 8 tokens; nearest possible: 56 tokens, 64 tokens",
        ),
        (
            "48 tokens",
            r"cannot be divided into batches of 4 on 1 rank\(s\) \(32 tokens per micro-batch\); nearest possible: 32, 64 tokens",
        ),
        ("5 steps", "is not possible: give an int of at least 1 .*'524_288 tokens'"),
        ({0: 4, "9 tokens": True}, "is of type bool"),
    ],
)
def test_sizes_that_are_not_possible(tmp_path: Path, sizes: Any, message: str) -> None:
    module = Tokens()
    with pytest.raises((ValueError, TypeError), match=message):
        fit(tmp_path, global_batch_size=sizes, max_steps=2).run(module, loader())
    assert module.w.item() == 0.0


def test_stages_and_rates_need_known_tokens(tmp_path: Path) -> None:
    stages = refusal(
        tmp_path,
        loader(Texts()),
        Tokens(weighted=True),
        max_duration="9 steps",
        global_batch_size={0: 4, "9 tokens": 8},
    )
    assert stages.startswith(
        "global_batch_size={0: 4, '9 tokens': 8}: the tokens must be known before each step, and Texts has no"
    )
    assert "Texts has no tokens_per_sample, so how many of its rows" in refusal(
        tmp_path, loader(Texts()), global_batch_size="32 tokens"
    )
    rates = refusal(tmp_path, loader(Texts()), Rates(), max_duration="9 steps")
    assert rates.startswith("the interval 'tokens' of LambdaLR: the tokens must be known before each step")


class Position(LRScheduler):
    def get_lr(self) -> Any:
        return [base * rate(self.last_epoch) for base in self.base_lrs]


class Product(LRScheduler):
    def get_lr(self) -> Any:
        return list(self.base_lrs) if self.last_epoch < 2 else [g["lr"] / 2 for g in self.optimizer.param_groups]


class Scheduled(Rates):
    def __init__(self, make: Any, interval: str = "samples", **entries: Any) -> None:
        super().__init__()
        self.make, self.entries = make, {"interval": interval, **entries}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.entries}}


def test_rates_are_functions_of_the_clock(tmp_path: Path) -> None:
    class Skips(Scheduled):
        """The rate moves on in steps that are skipped, too, also in the first."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx < 3 else loss

    for make in (Position, lambda optimizer: LambdaLR(optimizer, rate)):
        module = Skips(make)
        fit(tmp_path, max_epochs=2, on_nonfinite="skip").run(module, loader())
        assert module.rates == {tokens: rate(tokens // LENGTH) for tokens in module.rates}
        assert len(module.rates) == 26
    module = Scheduled(
        lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=398, anneal_strategy="linear", pct_start=0.5), "tokens"
    )
    fit(tmp_path, max_duration="398 tokens").run(module, loader())  # the last step passes the end
    peak, start, end = 398 * 0.5 - 1, 1 / 25, 1 / 25e4
    for tokens, found in module.rates.items():
        up, down = start + (1 - start) * tokens / peak, 1 - (1 - end) * (tokens - peak) / (397 - peak)
        assert found == pytest.approx(up if tokens <= peak else down)


@pytest.mark.parametrize(
    ("make", "entries", "message"),
    [
        (
            lambda o: CosineAnnealingLR(o, 100),
            {},
            r"CosineAnnealingLR computes each rate from the one before.*LambdaLR\(optimizer, lambda samples",
        ),
        (lambda o: SequentialLR(o, [LambdaLR(o, rate), LambdaLR(o, rate)], [3]), {}, "SequentialLR computes"),
        (Product, {}, "Product computes"),
        (Position, {"frequency": 2}, "frequency=2 with interval='samples': the rate follows the count at each step"),
        (Position, {"interval": "token"}, "interval='token' is unknown; did you mean 'tokens'"),
    ],
)
def test_rates_that_follow_the_step_before(tmp_path: Path, make: Any, entries: Any, message: str) -> None:
    module = Scheduled(make, **entries)
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, max_epochs=1).run(module, loader())
    assert module.w.item() == 0.0


def test_a_configured_schedule_begins_at_its_place(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=6, callbacks=[ModelCheckpoint()]).run(
        Scheduled(lambda o: LambdaLR(o, lambda _: 1.0)), loader()
    )
    module = Scheduled(lambda o: LambdaLR(o, rate))
    again = Resume(tmp_path / "checkpoints", hyperparameters="configured")
    fit(tmp_path / "again", max_steps=8).run(module, loader(), resume=again)
    assert list(module.rates.values()) == [rate(24), rate(28)]


def test_a_checkpoint_without_a_clock_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_steps=6, callbacks=[ModelCheckpoint()]).run(Tokens(), loader(Texts()))
    counts = Counts()
    again = fit(tmp_path / "again", max_duration="400 tokens", callbacks=[counts])
    caplog.set_level("INFO")
    assert again.run(Tokens(), loader(), resume=tmp_path / "checkpoints").step == 13
    assert counts.seen[0] == [7, 28, 224]
    assert "its 24 samples count as 8 tokens each" in caplog.text


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"max_time": "1 h"}, 4),
        ({"max_duration": "1 h"}, 4),
        ({"max_duration": "9e2 tokens", "global_batch_size": {0: 4, "400 tokens": 8}}, 8),
    ],
)
def test_a_step_behind_the_first_epoch_is_repeated(tmp_path: Path, settings: Any, rows: int) -> None:
    class Ends(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.step == 18:
                run.stop("enough")

    trained = fit(tmp_path, seed=1, callbacks=[ModelCheckpoint(every="5 steps"), Ends()], **settings)
    module = Tokens()
    trained.run(module, loader())
    step = trained.replay(Tokens(), loader(), step=15)
    assert (step.epoch, sorted(step.samples)) == (1, by_step([{"rows": module.rows}])[14])
    assert len(step.samples) == rows


def test_a_users_trigger_follows_the_clock(tmp_path: Path) -> None:
    class Mine(Callback):
        def __init__(self) -> None:
            self.every, self.steps = Every("100 samples"), []

        def on_train_start(self, run: Any, module: Any) -> None:
            self.every.follow(run.clock)

        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if self.every.due(run.step, None, run.elapsed_s):
                self.steps.append(run.step)

    mine = Mine()
    fit(tmp_path, max_duration="250 samples", callbacks=[mine]).run(Tokens(), loader())
    assert mine.steps == [26, 52]
    with pytest.raises(ValueError, match=r"only a training knows its samples: call every.follow\(run.clock\)"):
        Every("100 samples").due(3, None, 0.0)
