"""A run that ends at the step of a due validation, or within it, and the run that resumes it: together they are one undisturbed run."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import fit, ones
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, TensorBoardLogger
from engine import Callback, TrainModule

SCORES = {3: 0.3, 6: 0.1, 9: 0.2, 12: 0.4}


class Scored(TrainModule):
    """Each step takes 1 from the weight; the score of a step is that of :data:`SCORES`, and its loss the index of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
        return (self.weight * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", SCORES.get(round(-self.weight.item()), 1.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Ends(Callback):
    """Ends the run once, in the step or the validation after ``step``."""

    def __init__(self, event: str, how: str, step: int, copy: Path) -> None:
        self.how, self.step, self.copy, self.root = how, step, copy, copy.with_name("run")
        setattr(self, event, self.end)

    def end(self, run: Any, *args: Any) -> None:
        if run.step != self.step or self.how == "over":
            return
        how, self.how = self.how, "over"
        if how == "error":
            raise RuntimeError("planted")
        if how == "kill":
            run.wait_for_checkpoint()
            shutil.copytree(self.root, self.copy)
            raise RuntimeError("planted")
        os.kill(os.getpid(), getattr(signal, how))


def callbacks(often_first: bool) -> list[ModelCheckpoint]:
    often, best = ModelCheckpoint(every=1), ModelCheckpoint("3 steps", "score", save_top_k=2, save_last=False)
    return [often, best] if often_first else [best, often]


def rows_of(root: Path) -> list[dict[str, str]]:
    with (root / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def points_of(root: Path) -> dict[str, list[tuple[int, float]]]:
    """The points that TensorBoard shows, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def train(root: Path, ends: Sequence[Callback], often_first: bool, resume: str | None = None, **settings: Any) -> Any:
    options = {"max_steps": 12, "val_every": "3 steps", "log_every_n_steps": 1, **settings}
    loggers = [CSVLogger(), TensorBoardLogger()]
    return fit(root, callbacks=[*callbacks(often_first), *loggers, *ends], **options).run(
        Scored(), ones(8), ones(2), resume=resume
    )


@pytest.mark.parametrize("often_first", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("event", "how"),
    [
        ("on_train_batch_end", "SIGTERM"),
        ("on_train_batch_start", "SIGINT"),
        ("on_validation_batch_end", "SIGTERM"),
        ("on_validation_batch_end", "error"),
        ("on_validation_batch_end", "kill"),
    ],
)
def test_nothing_of_a_validation_is_lost(tmp_path: Path, event: str, how: str, often_first: bool) -> None:
    undisturbed = train(tmp_path / "whole", [], often_first)
    root = tmp_path / "run"
    step = 5 if event == "on_train_batch_start" else 6
    with pytest.raises(BaseException):  # noqa: B017
        train(root, [Ends(event, how, step, tmp_path / "copy")], often_first)
    root = tmp_path / "copy" if how == "kill" else root
    resumed = train(root, [], often_first, "last")
    # The checkpoint from which a run has resumed stays: the one with the score is saved beside it.
    assert [Path(path).name[:13] for path in (resumed.best_checkpoint, resumed.last_checkpoint)] == [
        "step=00000006",
        "step=00000012",
    ]
    assert json.loads((resumed.best_checkpoint / "manifest.json").read_text())["score"]["value"] == SCORES[6]
    assert resumed.metrics == undisturbed.metrics
    names = [{p.name[:13] for p in (path / "checkpoints").iterdir()} for path in (root, tmp_path / "whole")]
    assert names[0] == names[1]
    assert rows_of(root) == rows_of(tmp_path / "whole")
    assert points_of(root) == points_of(tmp_path / "whole")


class Stops(Callback):
    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.step == 5:
            run.stop("enough")


@pytest.mark.parametrize("monitor", [None, "score"])
@pytest.mark.parametrize("limits", [{"max_steps": 6}, {"max_steps": 5}, {"max_time": "0.000001 s", "min_steps": 5}, {}])
def test_an_epoch_that_was_cut_off_has_one_row(tmp_path: Path, limits: Any, monitor: str | None) -> None:
    """A run that ends within an epoch reports its values so far; one that goes on from there reports those of the whole epoch in their place."""

    def run(root: Path, resume: str | None, **settings: Any) -> Any:
        stops = [] if "max_steps" in settings else [Stops()]
        callbacks = [CSVLogger(), JSONLLogger(), TensorBoardLogger(), ModelCheckpoint("1 epochs", monitor), *stops]
        options = {"val_every": "3 steps", "log_every_n_steps": 1, "callbacks": callbacks, **settings}
        return fit(root, **options).run(Scored(), ones(8), ones(2), resume=resume)

    run(tmp_path / "whole", None, max_steps=12)
    cut = run(tmp_path / "cut", None, max_epochs=9 if "max_steps" not in limits else None, **limits)
    assert cut.metrics["loss_epoch"] == sum(range(cut.step)) / cut.step
    assert rows_of(tmp_path / "cut")[-1]["loss_epoch"] == str(cut.metrics["loss_epoch"])
    run(tmp_path / "cut", "last", max_steps=12)
    stopped_early = "max_steps" not in limits
    whole, resumed = ([*rows_of(root)] for root in (tmp_path / "whole", tmp_path / "cut"))
    # A stop validates once more, before the last checkpoint.
    assert [row for row in resumed if not (stopped_early and row["step"] == "5" and row["score"])] == whole
    points = points_of(tmp_path / "cut")
    assert points["loss_epoch"] == points_of(tmp_path / "whole")["loss_epoch"] == [(8, 3.5), (12, 1.5)]
    assert points["loss_step"] == points_of(tmp_path / "whole")["loss_step"]
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss_epoch" in line.get("values", ())] == [8, 12]


class Copies(Callback):
    """Copies the run's folder as a kill before a step would leave it, and ends the run."""

    def __init__(self, step: int, root: Path, copy: Path) -> None:
        self.step, self.root, self.copy = step, root, copy

    def on_train_batch_start(self, run: Any, *args: Any) -> None:
        if run.step == self.step:
            run.wait_for_checkpoint()
            shutil.copytree(self.root, self.copy)
            raise RuntimeError("planted")


def test_checkpoints_beside_those_that_runs_have_resumed_from_are_removed(tmp_path: Path) -> None:
    """The second run saves step 6 again, with its score; the third one resumes from there, and the fourth one knows neither."""
    roots = [tmp_path / str(number) for number in range(3)]
    with pytest.raises(RuntimeError, match="planted"):
        train(roots[0], [Ends("on_validation_batch_end", "error", 6, tmp_path)], True, max_steps=14)
    for number, step in enumerate((7, 13)):
        with pytest.raises(RuntimeError, match="planted"):
            train(roots[number], [Copies(step, roots[number], roots[number + 1])], True, "last", max_steps=14)
        assert (roots[number + 1] / "checkpoints" / "step=00000006-v1").is_dir()
    result = train(roots[2], [], True, "last", max_steps=14)
    assert result.best_checkpoint == roots[2] / "checkpoints" / "step=00000006-v1"
    names = sorted(path.name for path in (roots[2] / "checkpoints").iterdir())
    assert names == ["step=00000006-v1", "step=00000009", "step=00000013", "step=00000014"]


class Drops(Scored):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * self.drop(batch)).mean()


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_stay_draw_no_second_random_number(tmp_path: Path, persistent: bool) -> None:
    def run(root: Path, resume: Path | None) -> float:
        loader = DataLoader(torch.ones(8, 1), batch_size=2, num_workers=1, persistent_workers=persistent)
        module = Drops()
        fit(root, seed=3, max_epochs=3, callbacks=ModelCheckpoint(save_top_k=-1)).run(module, loader, resume=resume)
        return module.weight.item()

    whole = run(tmp_path / "whole", None)
    for step in (4, 8):
        assert run(tmp_path / str(step), tmp_path / "whole" / "checkpoints" / f"step={step:08d}") == whole
