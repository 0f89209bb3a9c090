"""``on_checkpoint_saved`` and ``on_checkpoint_removed``: of complete checkpoints only, once each, on all ranks after the same step."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.ranks import ranks_of
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint
from engine import Callback, Run, TrainModule
from engine.checkpoint.writer import CheckpointWriter

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")


class Hears(Callback):
    """What was said, with the run's step and what lay on the disk then."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_checkpoint_saved(self, run: Run, module: TrainModule, path: Path | str, score: float | None) -> None:
        complete = json.loads((Path(path) / "manifest.json").read_text())["counters"]["step"]
        self.heard.append(["saved", complete, score, run.step])

    def on_checkpoint_removed(self, run: Run, module: TrainModule, path: Path | str) -> None:
        assert not os.path.exists(path)
        self.heard.append(["removed", int(str(path).rpartition("=")[2]), None, run.step])

    def on_fit_end(self, run: Run, module: TrainModule) -> None:
        self.heard.append("fit end")


def saving(**arguments: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"every": "2 steps", "asynchronous": False, **arguments})


def test_each_after_the_step_that_saved_it(tmp_path: Path) -> None:
    hears = Hears()
    fit(tmp_path, max_steps=6, callbacks=[hears, saving()]).run(Weight(), ones(6))
    assert hears.heard == [
        *(["saved", 2, None, 2], ["saved", 4, None, 4], ["removed", 2, None, 4]),
        *(["saved", 6, None, 6], ["removed", 4, None, 6], "fit end"),
    ]


@pytest.mark.parametrize("hears", [[], [Hears()]])
def test_scores_are_not_collected(tmp_path: Path, hears: list[Callback]) -> None:
    class Counts(Callback):
        def on_train_end(self, run: Run, module: TrainModule) -> None:
            self.scores = dict(run.checkpoints.scores)

    counts = Counts()
    fit(tmp_path, max_steps=6, callbacks=[*hears, saving(), counts]).run(Weight(), ones(6))
    assert len(counts.scores) <= len(hears)  # the one whose event is yet to come


def test_the_score_is_the_one_that_best_means(tmp_path: Path) -> None:
    class Scored(Weight):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("score", float(self.global_step))

    hears = Hears()
    checkpoint = saving(every="1 epochs", monitor="score", save_last=False)
    result = fit(tmp_path, max_epochs=3, callbacks=[hears, checkpoint]).run(Scored(), ones(2), ones(1))
    assert hears.heard == [["saved", 2, 2.0, 2], "fit end"]  # the others are worse, and never kept
    assert str(result.best_checkpoint).endswith("step=00000002")


def test_of_one_that_is_written_beside_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, seal = threading.Event(), CheckpointWriter._seal

    def late(self: CheckpointWriter, *args: Any) -> None:
        go.wait(300)
        seal(self, *args)

    monkeypatch.setattr(CheckpointWriter, "_seal", late)
    heard_at: list[int] = []

    class Waits(Hears):
        def on_train_batch_end(self, run: Run, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
            if run.step == 5:
                assert not self.heard  # step 2 is not complete
                go.set()
                run.wait_for_checkpoint()
            if self.heard and not heard_at:
                heard_at.append(run.step)

    hears = Waits()
    checkpoint = ModelCheckpoint(every=None, save_top_k=3)

    class Once(Callback):
        def on_train_batch_end(self, run: Run, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
            if run.step == 2:
                run.save_checkpoint(asynchronous=True)

    fit(tmp_path, max_steps=8, callbacks=[Once(), hears, checkpoint]).run(Weight(), ones(8))
    assert heard_at == [6]
    assert hears.heard == [["saved", 2, None, 5], ["saved", 8, None, 8], "fit end"]


def test_after_an_error_what_was_saved_is_told(tmp_path: Path) -> None:
    class Fails(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    hears = Hears()
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, callbacks=[hears, saving(every="2 steps")]).run(Fails(), ones(6))
    assert hears.heard == [["saved", 2, None, 2], ["saved", 3, None, 3]]


def test_a_checkpoint_that_was_lost_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: CheckpointWriter, *args: Any) -> None:
        raise OSError("no space left")

    hears = Hears()

    class Breaks(Callback):
        def on_train_batch_start(self, run: Run, module: TrainModule, batch: Any, batch_idx: int) -> None:
            monkeypatch.setattr(CheckpointWriter, "_seal", full if run.step == 1 else seal)

    seal = CheckpointWriter._seal
    fit(tmp_path, max_steps=4, callbacks=[Breaks(), hears, saving(max_failures=3)]).run(Weight(), ones(4))
    assert hears.heard == [["saved", 4, None, 4], "fit end"]


def test_the_modules_own_events(tmp_path: Path) -> None:
    class Own(Weight):
        heard: list[Any] = []

        def on_checkpoint_saved(self, path: Path | str, score: float | None) -> None:
            self.heard.append(["saved", Path(path).name, score])

        def on_checkpoint_removed(self, path: Path | str) -> None:
            self.heard.append(["removed", Path(path).name])

    module = Own()
    fit(tmp_path, max_steps=4, callbacks=saving()).run(module, ones(4))
    assert module.heard == [
        ["saved", "step=00000002", None],
        ["saved", "step=00000004", None],
        ["removed", "step=00000002"],
    ]


def two(root: str) -> Any:
    hears = Hears()
    fit(
        root,
        max_steps=300,
        devices="auto",
        strategy="ddp",
        callbacks=[hears, ModelCheckpoint(every="50 steps", save_top_k=2)],
    ).run(Weight(), ones(600))
    return hears.heard


def test_on_two_ranks_alike(tmp_path: Path) -> None:
    one, other = ranks_of(two, 2, tmp_path)
    assert one == other
    assert one[-1] == "fit end"
    saved = [each[1] for each in one[:-1] if each[0] == "saved"]
    assert saved == [50, 100, 150, 200, 250, 300]
    assert [each[1] for each in one[:-1] if each[0] == "removed"] == [50, 100, 150, 200]
