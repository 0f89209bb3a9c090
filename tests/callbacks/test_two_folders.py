"""Two ``ModelCheckpoint`` in one run, each with its own folder: the best checkpoint beside the periodic ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import LINEAR_BATCHES, Linear, fit

from callbacks import ModelCheckpoint
from engine import Callback

STEPS = len(LINEAR_BATCHES)
"""Optimizer steps in an epoch."""


class Scored(Linear):
    """Its score is highest after the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("score", float(self.current_epoch == 0), on_step=False, on_epoch=True)
        return loss


def callbacks(root: Path) -> list[Callback]:
    best = ModelCheckpoint("1 epochs", monitor="score", mode="max", dirpath=root / "best", save_last=False)
    return [best, ModelCheckpoint("1 steps", dirpath=root / "all", save_top_k=2)]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step=")) for path in folder.glob("step=*"))


def test_the_best_beside_the_periodic(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_epochs=2).run(Scored(), LINEAR_BATCHES)
    assert steps_in(tmp_path / "best") == [STEPS]
    assert steps_in(tmp_path / "all") == [2 * STEPS - 1, 2 * STEPS]
    assert result.best_checkpoint == tmp_path / "best" / f"step={STEPS:08d}"
    assert result.last_checkpoint == tmp_path / "all" / f"step={2 * STEPS:08d}"


def test_last_is_the_newest_of_both(tmp_path: Path) -> None:
    whole, resumed = Scored(), Scored()
    fit(tmp_path / "whole", max_epochs=4).run(whole, LINEAR_BATCHES)
    fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_steps=2 * STEPS + 1).run(Scored(), LINEAR_BATCHES)
    trainer = fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_epochs=4)
    result = trainer.run(resumed, LINEAR_BATCHES, resume="last")
    assert torch.equal(resumed.net.weight, whole.net.weight)
    assert (
        result.best_checkpoint == tmp_path / "best" / f"step={STEPS:08d}"
    )  # of the first run, whose score still counts
    assert steps_in(tmp_path / "best") == [STEPS]
    assert steps_in(tmp_path / "all")[-2:] == [4 * STEPS - 1, 4 * STEPS]


def test_best_is_in_the_folder_of_the_callback_that_ranks(tmp_path: Path) -> None:
    for name, reverse in (("a", False), ("b", True)):
        module, both = Scored(), callbacks(tmp_path / name)
        trainer = fit(
            tmp_path / name / "run", callbacks=both[::-1] if reverse else both, max_epochs=2, reload_best=True
        )
        trainer.run(module, LINEAR_BATCHES)
        first = Scored()
        fit(tmp_path / name / "first", max_epochs=1).run(first, LINEAR_BATCHES)
        assert torch.equal(module.net.weight, first.net.weight)
        again = Scored()
        result = fit(tmp_path / name / "run", callbacks=callbacks(tmp_path / name), max_epochs=1).run(
            again, LINEAR_BATCHES, resume="best"
        )
        assert (result.step, torch.equal(again.net.weight, first.net.weight)) == (STEPS, True)


def test_a_path_names_its_folder(tmp_path: Path) -> None:
    fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_epochs=2).run(Scored(), LINEAR_BATCHES)
    for path in (tmp_path / "all" / f"step={2 * STEPS - 1:08d}", tmp_path / "best" / f"step={STEPS:08d}"):
        trainer = fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_epochs=3)
        assert trainer.run(Scored(), LINEAR_BATCHES, resume=path).step == 3 * STEPS
    assert not list(tmp_path.glob("*/version_*"))  # each has gone on in the folders of its run


def test_the_runs_folder_beside_another(tmp_path: Path) -> None:
    periodic = ModelCheckpoint("1 steps", save_top_k=1)
    elsewhere = ModelCheckpoint("1 epochs", monitor="score", mode="max", dirpath=tmp_path / "best", save_last=False)
    fit(tmp_path / "run", callbacks=[periodic, elsewhere], max_epochs=1).run(Scored(), LINEAR_BATCHES)
    assert steps_in(tmp_path / "run" / "checkpoints") == steps_in(tmp_path / "best") == [STEPS]


def test_events_have_the_paths_of_both(tmp_path: Path) -> None:
    class Watcher(Callback):
        def __init__(self) -> None:
            self.saved: list[Any] = []
            self.removed: list[Any] = []

        def on_checkpoint_saved(self, run: Any, module: Any, path: Any, score: float | None) -> None:
            self.saved.append((path.parent.name, path.name, score))

        def on_checkpoint_removed(self, run: Any, module: Any, path: Any) -> None:
            self.removed.append(path.parent.name)

    watcher = Watcher()
    fit(tmp_path / "run", callbacks=[*callbacks(tmp_path), watcher], max_epochs=1).run(Scored(), LINEAR_BATCHES)
    of_best = [entry for entry in watcher.saved if entry[0] == "best"]
    assert of_best == [("best", f"step={STEPS:08d}", 1.0)]
    assert [score for folder, _, score in watcher.saved if folder == "all"] == [None] * STEPS
    assert watcher.removed == ["all"] * (STEPS - 2)


def test_failed_writes_of_one_folder_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.checkpoint.local_storage import LocalStorage

    begin = LocalStorage.begin

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "all" in str(self.root):
            raise OSError("no space left")
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(LocalStorage, "begin", failing)
    with pytest.raises(RuntimeError, match=r"step=.* was not written: .*no space left.*\(3 failure\(s\) in a row\)"):
        fit(tmp_path / "run", callbacks=callbacks(tmp_path), max_epochs=2).run(Scored(), LINEAR_BATCHES)
