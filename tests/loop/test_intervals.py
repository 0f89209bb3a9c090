"""When a run logs and validates, and what it validates on: steps that are passed over, epochs of unequal length, runs that are short."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback


class Logs(Weight):
    """Logs the number of its step in training, and notes at which (epoch, step) it validates."""

    def __init__(self, optimizer_steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = optimizer_steps == 1
        self.optimizer_steps, self.validated = optimizer_steps, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step", float(self.global_step + self.optimizer_steps))
        if self.automatic_optimization:
            return loss
        for _ in range(self.optimizer_steps):
            self.optimizers().zero_grad()
            self.manual_backward((self.w * batch).mean())
            self.optimizers().step()
        return None

    def on_validation_start(self) -> None:
        self.validated.append((self.current_epoch, self.global_step))


class Rows(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if "step" in metrics:
            assert metrics["step"] == step
            self.steps.append(step)


def logged(root: Any, batches: int, module: Weight | None = None, resume: Any = None, **settings: Any) -> list[int]:
    rows = Rows()
    callbacks = [rows, *settings.pop("callbacks", [])]
    fit(root, **{"log_every_n_steps": 5, "callbacks": callbacks, **settings}).run(
        module or Logs(), ones(batches), resume=resume
    )
    return rows.steps


# -- steps that are passed over -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "at"), [(1, [5, 10, 15]), (2, [6, 10, 16]), (3, [6, 12, 15]), (7, [7, 14, 21])])
def test_an_interval_in_steps_holds_where_a_batch_makes_several(tmp_path: Path, each: int, at: list[int]) -> None:
    """At the first chance after each multiple of 5, once; 7 steps a batch pass 5, then 10, then 15 and 20."""
    module, keeper = Logs(each), ModelCheckpoint(every=5, save_top_k=-1)
    rows = Rows()
    fit(tmp_path, log_every_n_steps=5, val_every=5, callbacks=[rows, keeper]).run(module, ones(-(-18 // each)), ones(1))
    first, last = each, -(-18 // each) * each
    assert [step for _, step in module.validated][:3] == at
    assert rows.steps[: len({first, *at})] == sorted({first, *at})
    assert rows.steps[-1] == last
    assert sorted(keeper.scores)[:3] == at


# -- epochs of unequal length ---------------------------------------------------------------------------------------------------------


def test_a_fraction_of_an_epoch_is_of_that_epochs_own_length(tmp_path: Path) -> None:
    """Epochs of 8 steps, then of 2, then of 3 (windows of 1, 4 and 3): half of them is 4, 1 and 2 steps."""
    module, keeper = Logs(), ModelCheckpoint(every=0.5, save_top_k=-1)
    settings = {"max_epochs": 3, "val_every": 0.5, "accumulate_grad_batches": {0: 1, 1: 4, 2: 3}, "callbacks": [keeper]}
    fit(tmp_path, **settings).run(module, ones(8), ones(1))
    assert module.validated == [(0, 4), (0, 8), (1, 9), (1, 10), (2, 12), (2, 13)]
    assert sorted(keeper.scores) == [4, 8, 9, 10, 12, 13]


# -- a validation that is cut off -----------------------------------------------------------------------------------------------------


class CutOff(Logs):
    """Gets SIGTERM in the validation at the step ``at``; notes the steps whose validation is complete."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_step == self.at and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        pass

    def on_validation_end(self) -> None:
        self.validated.append((self.current_epoch, self.global_step))


@pytest.mark.parametrize(
    ("every", "at"), [("1 epochs", 4), ("1 epochs", 8), (2, 2), (2, 4), (0.5, 2), (0.5, 8), (3, 6)]
)
def test_a_resumed_run_makes_up_for_a_validation_that_sigterm_cut_off(
    tmp_path: Path, every: Any, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """2 epochs of 4 steps: the cut one and the resumed run validate together where an undisturbed run does, and stop at the same step."""
    settings: dict[str, Any] = {"max_epochs": 2, "val_every": every, "num_sanity_val_steps": 0}
    whole, cut, resumed = CutOff(), CutOff(at), CutOff()
    fit(tmp_path / "whole", **settings).run(whole, ones(4), ones(3))
    best = [ModelCheckpoint(every=every, monitor="val", save_top_k=-1) for _ in range(2)]
    with pytest.raises(SystemExit):
        fit(tmp_path / "cut", callbacks=best[0], **settings).run(cut, ones(4), ones(3))
    path = tmp_path / f"cut/checkpoints/step={at:08d}"
    assert f"SIGTERM: the training ended after step {at}, saved in {path};" in caplog.text
    fit(tmp_path / "cut", callbacks=best[1], **settings).run(resumed, ones(4), ones(3), resume="last")
    assert cut.validated + resumed.validated == whole.validated
    assert {step for _, step in whole.validated} <= {
        step for step, score in best[1].scores.items() if score is not None
    }
    saved = [json.loads(path.read_text()) for path in (tmp_path / "cut/checkpoints").glob("*/manifest.json")]
    scores = [manifest.get("score") for manifest in saved if manifest["counters"]["step"] == at]
    assert best[1].scores[at] in [score["value"] for score in scores if score is not None]


# -- short runs -----------------------------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_step_are_logged(tmp_path: Path) -> None:
    assert logged(tmp_path, 3) == [1, 3]
    assert logged(tmp_path, 1) == [1]
    assert logged(tmp_path, 5) == [1, 5]
    assert logged(tmp_path, 4, max_epochs=3) == [1, 5, 10, 12]
    assert logged(tmp_path, 9, max_steps=7) == [1, 5, 7]
    assert logged(tmp_path, 7, accumulate_grad_batches=2) == [1, 4]
    assert logged(tmp_path, 7, log_every_n_steps=0) == []


def test_a_run_that_is_stopped_logs_its_last_step(tmp_path: Path) -> None:
    class Stops(Callback):
        def __init__(self, hook: str, step: int) -> None:
            setattr(self, hook, lambda run, *args: run.stop() if run.step >= step else None)

    assert logged(tmp_path, 9, callbacks=[Stops("on_train_batch_end", 3)]) == [1, 3]
    assert logged(tmp_path, 4, callbacks=[Stops("on_train_epoch_end", 4)], max_epochs=9) == [1, 4]
    assert logged(tmp_path, 9, callbacks=[Stops("on_train_batch_end", 8)]) == [1, 5, 8]


def test_a_resumed_run_repeats_no_row(tmp_path: Path) -> None:
    assert logged(tmp_path, 9, max_steps=7, callbacks=[ModelCheckpoint(), CSVLogger()]) == [1, 5, 7]
    assert logged(tmp_path, 9, resume="last", callbacks=[ModelCheckpoint(), CSVLogger()]) == [9]
    assert logged(tmp_path, 9, max_epochs=2, resume="last", callbacks=[ModelCheckpoint(), CSVLogger()]) == [10, 15, 18]
    assert logged(tmp_path, 9, max_epochs=2, resume="last", callbacks=[ModelCheckpoint(), CSVLogger()]) == []
    (table,) = tmp_path.rglob("*.csv")
    assert [int(line.split(",")[0]) for line in table.read_text().splitlines()[1:]] == [1, 5, 7, 9, 10, 15, 18]


def test_the_log_line_of_a_short_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        fit(tmp_path).run(Logs(), ones(3))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert said == ["epoch 0 step 1: step=1", "epoch 0 step 3: step=3"]


def test_validation_at_the_last_step_comes_after_its_row(tmp_path: Path) -> None:
    order: list[str] = []

    class Order(Callback):
        def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
            order.append(f"{step} {' '.join(sorted(metrics))}")

    fit(tmp_path, callbacks=Order(), max_epochs=2).run(Logs(), ones(3), ones(1))
    assert order == ["1 step", "3 val", "6 step", "6 val"]


# -- what is validated on -------------------------------------------------------------------------------------------------------------


class Seen(Weight):
    """Notes the loaders' indices, and what the batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx, type(batch).__name__))

    predict_step = validation_step


X = torch.ones(2, 1)
ONE_LOADER = {
    "lists": [[X, X], [X, X]],
    "pairs": [(X, X), (X, X)],
    "nested lists": [[[X, X], X], [[X, X], X]],
    "nested pairs": [[(X, X), (X, X)], [(X, X), (X, X)]],
    "lists of dicts": [[{"x": X}, X], [{"x": X}, X]],
    "mappings": [UserDict(x=X), UserDict(x=X)],
    "arrays": [X.numpy(), X.numpy()],
}


@pytest.mark.parametrize("batches", ONE_LOADER.values(), ids=ONE_LOADER)
def test_a_list_of_batches_is_one_loader(tmp_path: Path, batches: Any) -> None:
    module = Seen()
    fit(tmp_path).run(module, ones(1), batches)
    assert [(index, loader) for index, loader, _ in module.seen] == [(0, 0), (1, 0)]


def test_lists_of_batches_by_name_are_several_loaders(tmp_path: Path) -> None:
    module = Seen()
    fit(tmp_path).run(module, ones(1), {"first": [[X, X]], "second": [(X, X)]})
    assert module.seen == [(0, 0, "list"), (0, 1, "tuple")]


@pytest.mark.parametrize("none", [[], (), {}])
def test_no_loader_is_no_validation(tmp_path: Path, none: Any) -> None:
    class WithItsOwn(Seen):
        def val_dataloader(self) -> Any:
            return ones(1)

    module = WithItsOwn()
    fit(tmp_path, num_sanity_val_steps=2).run(module, ones(1), none)
    assert module.seen == []
    with pytest.raises(ValueError, match="no data: give a loader"):
        fit(tmp_path).validate(module, none)


class Empty(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 0


def empty(root: str) -> Any:
    """The messages for an empty loader, and what one sample gives."""
    found = []
    for loaders in (DataLoader(Empty()), [DataLoader(torch.ones(3, 1)), DataLoader(Empty())]):  # type: ignore[arg-type]
        module = Weight()
        with pytest.raises(ValueError) as error:
            fit(root, devices="auto").run(module, ones(4), loaders)
        found.append([str(error.value), module.w.item()])
    one = fit(root, devices="auto").validate(Weight(2.0), DataLoader(torch.full((1, 1), 3.0)))  # type: ignore[arg-type]
    return [*found, one]


def test_an_empty_validation_loader_is_told_before_the_first_step(tmp_path: Path) -> None:
    for found in (empty(str(tmp_path)), *ranks_of(empty, 2, tmp_path)):
        (first, before), (second, weight), one = found
        assert first == "the validation loader (DataLoader) is empty; leave it out, or check its dataset"
        assert second == "the validation loader 1 (DataLoader) is empty; leave it out, or check its dataset"
        assert before == weight == 0.0
        assert one == [{"val": 6.0}]  # the second rank has no batch
