"""Hyperparameters, requires_grad and edits of parameters that differ between the ranks are an error on all ranks, with both values."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import EMA, EarlyStopping, ModelCheckpoint
from engine import Callback, CheckError, Engine, Fit, TrainModule

STEPS = 40


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Change(Callback):
    """Changes something on some ranks after step 3 (``when="step"``) or before the first."""

    def __init__(self, change: Any, when: str = "step", ranks: tuple[int, ...] = (1,)) -> None:
        self.change, self.when, self.ranks = change, when, ranks

    def on_train_start(self, run: Any, module: Any) -> None:
        if self.when == "start" and run.rank in self.ranks:
            self.change(run, module)

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when == "step" and run.step == 3 and run.rank in self.ranks:
            self.change(run, module)


def rate(run: Any, module: Any) -> None:
    run.optimizers[0].param_groups[0]["lr"] = 0.2


def decay(run: Any, module: Any) -> None:
    run.optimizers[0].param_groups[0]["weight_decay"] = 0.01


def freeze(run: Any, module: Any) -> None:
    module.first.bias.requires_grad_(False)


def edit(run: Any, module: Any) -> None:
    with torch.no_grad():
        module.second.weight[0, 1] += 1.0


def edit_and_save(run: Any, module: Any) -> None:
    if run.rank == 1:
        edit(run, module)
    run.save_checkpoint("edited")
    raise AssertionError("an edited parameter was saved")


def draw_and_save(run: Any, module: Any) -> None:
    """Each rank sets its own values, as often as the others, and past the version counters."""
    module.second.weight.data.fill_(float(run.rank))
    run.save_checkpoint("drawn")
    run.save_checkpoint("drawn again")


def rewrite(run: Any, module: Any) -> None:
    """An edit that changes no value."""
    with torch.no_grad():
        module.second.weight.copy_(module.second.weight.clone())


def attempt(*callbacks: Callback, strategy: str = "ddp") -> str:
    data = TensorDataset(torch.ones(2 * STEPS, 3))
    fit = Fit(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), log_every_n_steps=0, strategy=strategy)
    try:
        return f"step {fit.run(Net(), DataLoader(data, 1)).step}"
    except CheckError as error:
        return str(error)


def rank_rate() -> str:
    return attempt(Change(rate))


def rank_rate_at_the_start() -> str:
    return attempt(Change(rate, "start"))


def rank_rate_on_both() -> str:
    return attempt(Change(rate, ranks=(0, 1)))


def rank_decay_fsdp() -> str:
    return attempt(Change(decay), strategy="fsdp")


def rank_freeze_fsdp() -> str:
    return attempt(Change(freeze, "start"), strategy="fsdp")


def rank_edit() -> str:
    return attempt(Change(edit))


def rank_edit_on_both() -> str:
    return attempt(Change(edit, ranks=(0, 1)))


def rank_edit_before_a_save() -> str:
    """The save comes before the next agreement."""
    return attempt(Change(edit_and_save, ranks=(0, 1)))


def warnings_of(callback: Callback, words: str) -> list[str]:
    """The warnings of a run that contain ``words``; a busy machine gives others."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine").addHandler(handler)
    attempt(callback)
    logging.getLogger("engine").removeHandler(handler)
    return [record for record in records if words in record]


def rank_warnings_of_values() -> list[str]:
    return warnings_of(Change(draw_and_save, ranks=(0, 1)), "different values")


def fill(run: Any, module: Any) -> None:
    """A change past the version counters."""
    module.second.weight.data.fill_(float(run.rank))


def rank_warnings_at_an_epochs_end() -> list[str]:
    return warnings_of(Change(fill), "different values")


def rewrite_and_save(run: Any, module: Any) -> None:
    """Rank 1 rewrites a parameter before each of five saves."""
    for number in range(5):
        if run.rank == 1:
            rewrite(run, module)
        run.save_checkpoint(f"rewritten {number}")


def rank_warnings_of_false_alarms() -> list[str]:
    return warnings_of(Change(rewrite_and_save, ranks=(0, 1)), "at different times")


def rank_rewrite() -> str:
    return attempt(Change(rewrite))


def freeze_others(run: Any, module: Any) -> None:
    """Each rank freezes another parameter, and the next forward pass comes before the next agreement."""
    (module.first.weight if run.rank else module.first.bias).requires_grad_(False)
    run.control.agreement.compared = None


def freeze_alike(run: Any, module: Any) -> None:
    module.first.bias.requires_grad_(False)


def rank_freeze_others_fsdp() -> str:
    return attempt(Change(freeze_others, ranks=(0, 1)), strategy="fsdp")


def rank_freeze_alike_fsdp() -> str:
    return attempt(Change(freeze_alike, ranks=(0, 1)), strategy="fsdp")


def unlike(difference: str, strategy: str) -> str:
    """The error about models that were built differently."""
    module, rank = Net(), int(os.environ["RANK"])
    if rank and difference == "frozen":
        module.first.bias.requires_grad_(False)
    elif difference == "dropout":
        module.second = nn.Sequential(module.second, nn.Dropout((0.1, 0.2)[rank]))  # type: ignore[assignment]
    elif rank:
        module.second = nn.Linear(3, 2)
    try:
        Engine(accelerator="cpu", strategy=strategy).prepare(module)
    except CheckError as error:
        return str(error)
    return "no error"


def rank_frozen_before_ddp() -> str:
    return unlike("frozen", "ddp")


def rank_frozen_before_fsdp() -> str:
    return unlike("frozen", "fsdp")


def rank_replaced_before_fsdp() -> str:
    return unlike("replaced", "fsdp")


def differing(**settings: tuple[Any, Any]) -> str:
    """The error of a run whose settings differ: their values by rank."""
    rank = int(os.environ["RANK"])
    of_rank = {name: values[rank] for name, values in settings.items()}
    try:
        Fit(**{"max_epochs": 1, "accelerator": "cpu", **of_rank}).run(
            Net(), DataLoader(TensorDataset(torch.ones(8, 3)), 1)
        )
    except CheckError as error:
        return str(error)
    return "no error"


def rank_clipping() -> str:
    return differing(gradient_clip_val=(1.0, 0.01))


def rank_limit() -> str:
    return differing(limit_train_batches=(3, 4))


def rank_validations() -> str:
    return differing(val_every=("1 epochs", 5))


def rank_checkpoint_callback() -> str:
    return differing(callbacks=([], [ModelCheckpoint()]))


def rank_checkpoint_interval() -> str:
    return differing(callbacks=([ModelCheckpoint(every=2)], [ModelCheckpoint(every=3)]))


def rank_stopping_argument() -> str:
    stops = [EarlyStopping("loss", patience=patience) for patience in (1, 2)]
    return differing(callbacks=([ModelCheckpoint(), stops[0]], [ModelCheckpoint(), stops[1]]))


def rank_average() -> str:
    """A user's class, with a value of the rank."""

    class Own(EMA):
        rank = os.environ["RANK"]

    return differing(callbacks=([Own(0.5)], [Own(0.6)]))


def rank_folder() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return differing(callbacks=([ModelCheckpoint(dirpath=f"{folder}/0")], [ModelCheckpoint(dirpath=f"{folder}/1")]))


def rank_validation_on_one_rank() -> str:
    rank = int(os.environ["RANK"])
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), 1)
    try:
        Fit(max_epochs=1, accelerator="cpu").run(Net(), loader, loader if rank == 0 else None)
    except CheckError as error:
        return str(error)
    return "no error"


def rank_dropout_before_ddp() -> str:
    return unlike("dropout", "ddp")


def rank_own_callback() -> str:
    """Callbacks that only one rank needs, as progress bars."""
    return differing(callbacks=([Callback()], []))


def rank_engine_settings() -> str:
    rank = int(os.environ["RANK"])
    try:
        Engine(accelerator="cpu", precision=("32-true", "bf16-mixed")[rank])
    except CheckError as error:
        return str(error)
    return "no error"


def engine_loop(strategy: str, rates: tuple[float, float], later: float = 0.1) -> str:
    """Two steps, then rank 1 takes the rate ``later``, then a save."""
    engine = Engine(accelerator="cpu", strategy=strategy)
    rank, plain = engine.process_index, nn.Linear(3, 1)
    model, optimizer = engine.prepare(plain, torch.optim.SGD(plain.parameters(), lr=rates[rank]))
    try:
        for _ in range(2):
            engine.backward(model(torch.ones(2, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if rank:
            optimizer.param_groups[0]["lr"] = later
        with tempfile.TemporaryDirectory() as folder:
            engine.save_state(f"{folder}/saved")
    except CheckError as error:
        return str(error)
    return "saved"


def rank_engine_rate() -> str:
    return engine_loop("ddp", (0.1, 0.2))


def rank_engine_rate_fsdp() -> str:
    return engine_loop("fsdp", (0.1, 0.2))


def rank_engine_rate_later() -> str:
    return engine_loop("ddp", (0.1, 0.1), later=0.2)


@pytest.fixture(scope="module")
def by_rank() -> dict[str, list[str]]:
    return ranks_of_file(__file__, 2)


RATE = "optimizer 0, group 0, lr: rank 0 has 0.1, rank 1 has 0.2"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("rate", RATE),
        ("rate_at_the_start", RATE),
        ("rate_on_both", "step 40"),
        ("decay_fsdp", "optimizer 0, group 0, weight_decay: rank 0 has 0, rank 1 has 0.01"),
        ("freeze_fsdp", "first.bias.requires_grad: rank 0 has True, rank 1 has False"),
        ("edit", "second.weight: rank 0 has torch.float32, [1, 3], checksum "),
        ("edit_on_both", "step 40"),
        ("edit_before_a_save", "second.weight: rank 0 has torch.float32, [1, 3], checksum "),
        ("rewrite", "step 40"),
        ("freeze_others_fsdp", "first.bias.requires_grad: rank 0 has False, rank 1 has True"),
        ("freeze_alike_fsdp", "step 40"),
        (
            "frozen_before_ddp",
            "first.bias: rank 0 has torch.float32, [3], trained, rank 1 has torch.float32, [3], frozen",
        ),
        (
            "frozen_before_fsdp",
            "first.bias: rank 0 has torch.float32, [3], trained, rank 1 has torch.float32, [3], frozen",
        ),
        (
            "replaced_before_fsdp",
            "second.weight: rank 0 has torch.float32, [1, 3], trained, rank 1 has torch.float32, [2, 3]",
        ),
        ("clipping", "gradient_clip_val: rank 0 has 1.0, rank 1 has 0.01"),
        ("limit", "limit_train_batches: rank 0 has 3, rank 1 has 4"),
        ("validations", "val_every: rank 0 has 1 epochs, rank 1 has 5 steps"),
        ("checkpoint_callback", "callbacks that all ranks need: rank 0 has none, rank 1 has ModelCheckpoint"),
        ("own_callback", "no error"),
        ("checkpoint_interval", "ModelCheckpoint.every: rank 0 has 2 steps, rank 1 has 3 steps"),
        ("stopping_argument", "EarlyStopping (1).patience: rank 0 has 1, rank 1 has 2"),
        ("average", "Own.decay: rank 0 has 0.5, rank 1 has 0.6"),
        ("folder", "no error"),
        (
            "validation_on_one_rank",
            "the validation loaders differ between the ranks:\n  number: rank 0 has 1, rank 1 has 0",
        ),
        (
            "dropout_before_ddp",
            "layer second.1: rank 0 has Dropout(p=0.1, inplace=False), rank 1 has Dropout(p=0.2, inplace=False)",
        ),
        ("engine_settings", "precision: rank 0 has 32-true, rank 1 has bf16-mixed"),
        ("engine_rate", RATE),
        ("engine_rate_fsdp", RATE),
        ("engine_rate_later", RATE),
    ],
)
def test_what_differs_is_named_on_all_ranks(by_rank: dict[str, list[str]], name: str, part: str) -> None:
    for text in by_rank[name]:
        assert part in text


def test_a_save_warns_of_replicas_with_different_values(by_rank: dict[str, list[list[str]]]) -> None:
    (warning,), others = by_rank["warnings_of_values"]
    assert warning.startswith("the ranks have different values of second.weight, although each has the whole model")
    assert not others


def test_an_epochs_end_warns_of_replicas_with_different_values(by_rank: dict[str, list[list[str]]]) -> None:
    (warning,), others = by_rank["warnings_at_an_epochs_end"]
    assert warning.startswith("the ranks have different values of second.weight")
    assert not others


def test_the_search_for_edits_says_that_it_ends(by_rank: dict[str, list[list[str]]]) -> None:
    (warning,), others = by_rank["warnings_of_false_alarms"]
    assert warning.startswith(
        "the ranks have changed second.weight at different times, but to the same values, 3 times"
    )
    assert "ReplicaCheck" in warning
    assert not others
