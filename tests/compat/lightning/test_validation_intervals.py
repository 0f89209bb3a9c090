"""Validations within epochs under both trainers: when they come, which checkpoints they leave, and when early stopping ends the training."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer

SCORES = 5.0, 1.0, 3.0, 4.0, 2.0, 6.0, 0.5, 7.0, 8.0, 9.0, 9.5, 9.7, 9.8, 9.9, 10.0, 11.0


def scripted(L: Any, scores: tuple[float, ...] = SCORES) -> Any:
    """A module whose validations have the given scores, one after the other; it remembers the step of each."""

    class Net(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
            self.log("step_loss", float(batch_idx), on_step=True, on_epoch=False)
            self.log("epoch_loss", float(self.current_epoch), on_step=False, on_epoch=True)
            return loss

        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking:
                self.validated.append(self.trainer.global_step)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", scores[max(0, len(self.validated) - 1)])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Net()


def outcome(
    L: Any, folder: Path, options: dict[str, Any], checkpoint: dict[str, Any], stopping: dict[str, Any] | None
) -> Any:
    """What a training leaves. Eight micro-batches are an epoch."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    keeps = L.callbacks.ModelCheckpoint(**{"dirpath": folder, "filename": "{step}", **checkpoint})
    stops = [] if stopping is None else [L.callbacks.EarlyStopping(**{"monitor": "score", **stopping})]
    fitted = trainer(L, folder / "root", enable_checkpointing=True, callbacks=[keeps, *stops], **options)
    net = scripted(L)
    loaders = (data(32), data(4)) if options.get("limit_val_batches") != 0 else (data(32),)
    quietly(fitted.fit, net, *loaders)
    score = keeps.best_model_score
    return {
        "validated": net.validated,
        "files": sorted(path.name for path in folder.glob("*.ckpt") if "last" not in path.name),
        "best": Path(keeps.best_model_path).name,
        "score": None if score is None else float(score),
        "ranked": {Path(path).name: float(score) for path, score in keeps.best_k_models.items()},
        "steps": fitted.global_step,
        "stopped": [stop.stopped_epoch or 0 for stop in stops],
        "waited": [stop.wait_count for stop in stops],
    }


BEST: dict[str, Any] = {"monitor": "score"}
ALL: dict[str, Any] = {"save_top_k": -1}
CASES: list[Any] = [
    ({"val_check_interval": 0.25}, ALL, None),
    ({"val_check_interval": 0.25}, BEST, {"patience": 3}),
    ({"val_check_interval": 0.5}, {**BEST, "save_top_k": 2}, {"patience": 2}),
    ({"val_check_interval": 3}, BEST, None),
    ({"val_check_interval": 3}, ALL, {"patience": 1}),
    ({"val_check_interval": 8}, ALL, {"patience": 1}),
    ({"val_check_interval": 1}, ALL, {"patience": 1}),
    ({"val_check_interval": 1}, BEST, None),
    ({"val_check_interval": 3, "check_val_every_n_epoch": None}, ALL, {"patience": 2}),
    ({"val_check_interval": 10, "check_val_every_n_epoch": None}, BEST, None),
    ({"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, ALL, {"patience": 1}),
    ({"check_val_every_n_epoch": 2, "max_epochs": 5}, ALL, {"patience": 1}),
    ({"check_val_every_n_epoch": 2, "max_epochs": 5}, {**ALL, "every_n_epochs": 3}, None),
    ({"val_check_interval": 0.5, "accumulate_grad_batches": 2}, ALL, {"patience": 2}),
    ({"val_check_interval": 4, "accumulate_grad_batches": 2}, BEST, None),
    ({"val_check_interval": 3, "accumulate_grad_batches": 2, "max_steps": 1, "max_epochs": -1}, ALL, None),
    ({"val_check_interval": 5, "check_val_every_n_epoch": None, "accumulate_grad_batches": 4}, ALL, None),
    ({"val_check_interval": 0.25, "max_epochs": 4}, {**ALL, "every_n_epochs": 2}, None),
    ({"val_check_interval": 0.25}, {**ALL, "every_n_train_steps": 3}, None),
    ({"max_epochs": 5}, {**ALL, "every_n_epochs": 2}, None),
    ({"max_epochs": 2}, {**ALL, "every_n_train_steps": 5}, None),
    ({"max_steps": 11, "max_epochs": -1}, {**ALL, "every_n_train_steps": 4}, None),
    ({"max_steps": 11, "max_epochs": -1}, ALL, None),
    ({"max_steps": 11, "max_epochs": -1, "val_check_interval": 0.5}, {**ALL, **BEST}, None),
    ({"val_check_interval": 0.5}, {**BEST, "save_on_train_epoch_end": True}, {"check_on_train_epoch_end": True}),
    ({}, {**BEST, "save_on_train_epoch_end": True}, {"check_on_train_epoch_end": True, "patience": 1}),
    ({}, {**ALL, "save_on_train_epoch_end": False}, {"check_on_train_epoch_end": False, "patience": 1}),
    ({"limit_val_batches": 0, "val_check_interval": 0.5}, ALL, {"monitor": "epoch_loss", "patience": 1}),
    ({"limit_val_batches": 0}, {"monitor": "epoch_loss", "mode": "max"}, {"monitor": "step_loss"}),
    ({"val_check_interval": 0.25}, {"monitor": "step_loss", "save_top_k": 2}, {"monitor": "step_loss"}),
    ({"val_check_interval": 0.25, "limit_train_batches": 4}, ALL, {"stopping_threshold": 1.5}),
    ({"val_check_interval": 0.5, "limit_train_batches": 0.5}, ALL, {"divergence_threshold": 3.5}),
    ({"val_check_interval": 0.25, "num_sanity_val_steps": 1}, BEST, {"patience": 3}),
    ({"check_val_every_n_epoch": 2, "limit_val_batches": 0}, ALL, {"monitor": "epoch_loss", "patience": 1}),
    ({"val_check_interval": 0.25, "min_steps": 13, "max_epochs": 3}, BEST, {"patience": 3}),
    ({"val_check_interval": 0.5}, {**ALL, "mode": "max", "monitor": "score"}, {"mode": "max", "patience": 1}),
]


QUICK = 1, 2, 4, 8, 11, 19, 24, 31


@pytest.mark.parametrize(
    ("options", "checkpoint", "stopping"),
    [pytest.param(*case, marks=[] if n in QUICK else pytest.mark.slow) for n, case in enumerate(CASES)],
)
def test_validations_checkpoints_and_stops_are_lightnings(
    tmp_path: Path, options: dict[str, Any], checkpoint: dict[str, Any], stopping: dict[str, Any] | None
) -> None:
    theirs = outcome(THEIRS, tmp_path / "theirs", options, checkpoint, stopping)
    assert outcome(OURS, tmp_path / "ours", options, checkpoint, stopping) == theirs


def test_the_newest_checkpoint_is_the_best_one_only_if_it_was_to_be_kept(tmp_path: Path) -> None:
    found = []
    for name, library in (("theirs", THEIRS), ("ours", OURS)):
        for top, monitor in ((0, None), (1, None), (0, "score"), (1, "score")):
            place = tmp_path / name / f"{top} {monitor}"
            saves = library.callbacks.ModelCheckpoint(place, save_last=True, save_top_k=top, monitor=monitor)
            fitted = trainer(library, place, enable_checkpointing=True, callbacks=[saves], max_epochs=3)
            quietly(fitted.fit, scripted(library), data(), data(4))
            ranked = [float(score) for score in saves.best_k_models.values()]
            found.append((Path(saves.best_model_path).name, ranked, Path(saves.last_model_path).exists()))
    assert found[4:] == found[:4]


def test_a_callback_that_waits_for_validations_of_which_there_are_none_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stops = OURS.callbacks.EarlyStopping("epoch_loss", check_on_train_epoch_end=False)
    fitted = trainer(OURS, tmp_path, check_val_every_n_epoch=2, max_epochs=1, callbacks=[stops])
    with caplog.at_level(logging.WARNING, "engine"):
        fitted.fit(scripted(OURS), data())
    assert "EarlyStopping(check_on_train_epoch_end=True)" in caplog.text


def test_a_time_interval_of_zero_saves_at_each_opportunity(tmp_path: Path) -> None:
    every = OURS.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, train_time_interval=timedelta(0), every_n_epochs=0)
    trainer(OURS, tmp_path, enable_checkpointing=True, callbacks=[every], max_steps=3).fit(module(OURS), data())
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
