"""How much a run trains, tests and predicts, and what may end it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor

from callbacks import CSVLogger, ModelCheckpoint
from engine import Callback


@pytest.mark.parametrize(("limit", "count"), [(None, 4), (3, 3), (0.5, 2), (1, 1), (1.0, 4), (0, 0)])
def test_limits_of_tests_and_predictions(tmp_path: Path, limit: Any, count: int) -> None:
    class Counts(Weight):
        tested = validated = 0

        def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.tested += 1

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validated += 1

        def predict_step(self, batch: Tensor, batch_idx: int) -> int:
            return batch_idx

    module = Counts()
    trainer = fit(tmp_path, limit_test_batches=limit, limit_predict_batches=limit, limit_val_batches=2)
    assert trainer.test(module, ones(4)) == ([] if limit == 0 else [{}])
    assert trainer.predict(module, ones(4)) == list(range(count))
    trainer.validate(module, ones(4))
    assert (module.tested, module.validated) == (count, 2)
    assert fit(tmp_path, limit_val_batches=limit).validate(module, ones(4)) == ([] if limit == 0 else [{}])
    assert module.validated == 2 + count
    fast = fit(tmp_path, fast_dev_run=2)
    assert (fast.test(module, ones(4)), fast.predict(module, ones(4)), module.tested) == ([{}], [0, 1], count + 2)


class StopsAt(Callback):
    """Asks to stop at a batch, once."""

    def __init__(self, batch: int) -> None:
        self.batch, self.batches = batch, 0

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        self.batches += 1
        if self.batches == self.batch:
            run.stop("enough")


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 2),
        ({"min_steps": 5}, 5),
        ({"min_steps": 2}, 2),
        ({"min_steps": 1}, 2),
        ({"min_epochs": 2}, 8),
        ({"min_epochs": 1, "min_steps": 6}, 6),
        ({"min_epochs": 2, "min_steps": 6}, 8),
        ({"min_steps": 5, "max_steps": 5}, 5),
        ({"min_epochs": 3}, 12),
        ({"min_steps": 5, "log_every_n_steps": 0, "gc_every_n_steps": 0}, 5),
        ({"min_epochs": 3, "fast_dev_run": 1}, 1),
    ],
)
def test_nothing_stops_before_the_minimum(tmp_path: Path, settings: dict[str, Any], steps: int) -> None:
    result = fit(tmp_path, max_epochs=3, callbacks=StopsAt(2), **settings).run(Weight(), ones(4))
    assert result.step == steps
    if steps < 12 and not settings.get("max_steps") and not settings.get("fast_dev_run"):
        assert (result.status, result.stop_reason) == ("stopped", "enough")


def test_the_minimum_holds_against_the_time_limit_and_not_against_a_maximum(tmp_path: Path) -> None:
    assert fit(tmp_path, max_time="0.000001 s", min_steps=6).run(Weight(), ones(4)).step == 6
    assert fit(tmp_path, max_time="0.000001 s", min_epochs=2).run(Weight(), ones(4)).step == 8
    for settings in ({"min_epochs": 2}, {"min_epochs": 4, "max_epochs": 3}, {"min_steps": 4, "max_steps": 3}):
        with pytest.raises(ValueError, match=r"min_(\w+)=\d and max_\1=\d: the training would end before its minimum"):
            fit(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"min_steps=9 and max_epochs=2: the training would end after 8 step\(s\)"):
        fit(tmp_path, max_epochs=2, min_steps=9).run(Weight(), ones(4))


def test_overfitting_and_limits_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="overfit_batches=2 and limit_val_batches=3: the first sets the second"):
        fit(tmp_path, overfit_batches=2, limit_val_batches=3)
    trainer = fit(tmp_path, overfit_batches=2)
    assert trainer.origins["limit_train_batches"] == "overfit_batches"
    assert trainer.run(Weight(), ones(4)).step == 2


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"min_steps": 10}, 10), ({"min_epochs": 3}, 12), ({"min_epochs": 1, "min_steps": 5}, 5), ({"min_steps": 8}, 8)],
)
def test_a_stop_that_waits_is_in_the_checkpoint(tmp_path: Path, settings: Any, steps: int) -> None:
    """Runs that go on from any checkpoint after the request end where the whole run ends; one that goes on from its end trains on."""
    callbacks = [StopsAt(3), ModelCheckpoint(1, save_top_k=-1)]
    whole = fit(tmp_path / "whole", max_epochs=6, callbacks=callbacks, **settings).run(Weight(), ones(4))
    assert (whole.step, whole.stop_reason) == (steps, "enough")
    for step in (steps, steps - 1, 4, 3):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step={step:08d}"
        resumed = fit(tmp_path / str(step), max_epochs=6, **settings).run(Weight(), ones(4), resume=checkpoint)
        end = (24, "max_epochs=6 reached") if step == steps else (steps, "enough")
        assert (resumed.step, resumed.stop_reason) == end, step
    later = fit(tmp_path / "later", max_epochs=6, min_steps=20).run(Weight(), ones(4), resume=checkpoint)
    assert (later.step, later.stop_reason) == (20, "enough")


class Ends(Callback):
    """Writes down the ends of epochs, and the values that are logged then."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.logged: list[tuple[int, list[str]]] = []

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        self.epochs.append(run.step)

    def on_log(self, run: Any, module: Any, values: dict[str, float], step: int) -> None:
        self.logged.append((step, sorted(values)))

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "logged": self.logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs, self.logged = state["epochs"], [tuple(entry) for entry in state["logged"]]


class Logs(Weight):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class Copies(Callback):
    """Copies the run's folder as a SIGKILL at each of these events would leave it, once the run stops."""

    runs_last = True
    events = ("on_train_batch_end", "on_validation_end", "on_train_end", "on_fit_end", "teardown")

    def __init__(self, root: Path) -> None:
        def copy(event: str, run: Any, *args: Any) -> None:
            if run.stopping:
                run.wait_for_checkpoint()
                shutil.copytree(run.folder, root / event)

        for event in self.events:
            setattr(self, event, partial(copy, event))


@pytest.mark.parametrize(
    ("batch", "every", "settings", "steps", "saved_from"),
    [
        (6, 1, {}, 6, "on_train_batch_end"),
        (6, 4, {}, 6, "on_train_end"),
        (3, 1, {"min_steps": 7}, 7, "on_validation_end"),  # the stop waits in the step
        (4, 1, {}, 4, "on_validation_end"),  # at an epoch's end a step is saved after its validation
        (0, 1, {"max_time": "0.000001 s", "min_steps": 6}, 6, "on_validation_end"),
    ],
)
def test_a_run_that_is_killed_as_it_stops_is_resumed_to_stop(
    tmp_path: Path, batch: int, every: int, settings: Any, steps: int, saved_from: str
) -> None:
    """It ends as the whole run ends, with its validation, its epoch's end and its values, each once. Then it trains on if it is asked to."""

    def run(folder: str, *callbacks: Callback, **options: Any) -> Any:
        saves = ModelCheckpoint(every, "val", save_top_k=-1)
        all_callbacks = [CSVLogger(), *callbacks[:2], saves, *callbacks[2:]]
        trainer = fit(tmp_path / folder, max_epochs=3, callbacks=all_callbacks, **settings)
        return trainer.run(Logs(), ones(4), ones(1), **options), saves

    ends = Ends()
    whole, saves = run("whole", ends, StopsAt(batch), Copies(tmp_path))
    assert (whole.step, whole.status) == (steps, "stopped")
    copies = [event for event in Copies.events if (tmp_path / event / f"checkpoints/step={steps:08d}").exists()]
    assert copies == list(Copies.events[Copies.events.index(saved_from) :])
    for event in copies:
        again = Ends()
        resumed, saved = run(event, again, resume="auto")
        assert (resumed.step, resumed.status) == (steps, "stopped"), event
        assert resumed.stop_reason.startswith("enough" if batch else "max_time"), event
        assert (again.epochs, again.logged) == (ends.epochs, ends.logged), event
        assert (resumed.metrics, saved.scores) == (whole.metrics, saves.scores), event
        assert (resumed.folder / "metrics.csv").read_text() == (whole.folder / "metrics.csv").read_text(), event
    again, _ = run(event, resume="auto")
    longer, _ = run(event, resume="last")
    assert (again.step, longer.step) == (steps, 12 if batch else 6)
    more = fit(tmp_path / "whole", max_epochs=4, callbacks=ModelCheckpoint(9))
    assert more.run(Logs(), ones(4), ones(1), resume="auto").step == 16


class Interrupted(StopsAt):
    """Asks to stop at a batch in which SIGTERM comes."""

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        super().on_train_batch_end(run)
        if self.batches == self.batch:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_the_step_of_a_stop_does_not_lose_it(tmp_path: Path) -> None:
    def run(*callbacks: Callback, **options: Any) -> Any:
        trainer = fit(tmp_path, max_epochs=3, callbacks=[*callbacks, ModelCheckpoint("2 epochs", "val")])
        return trainer.run(Logs(), ones(4), ones(1), **options)

    with pytest.raises(SystemExit):
        run(Interrupted(6))
    resumed = run(resume="last")
    assert (resumed.step, resumed.stop_reason, resumed.metrics["val"]) == (6, "enough", -6.0)
    assert run(resume="last").step == 12


class Validates(Weight):
    """Writes down the steps that were validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(round(-self.w.item()))


@pytest.mark.parametrize(
    ("settings", "batch", "validated"),
    [
        ({}, 6, [4, 6]),
        ({"val_every": "2 epochs"}, 6, [6]),
        ({"val_every": "3 steps"}, 6, [3, 6]),
        ({"val_every": "3 steps"}, 7, [3, 6, 7]),
        ({"val_every": None}, 6, []),
        ({"min_steps": 7}, 6, [4, 7]),
        ({"val_every": "2 epochs"}, 4, [4]),
        ({"max_time": "0.000001 s", "min_steps": 6}, 0, [4, 6]),
        ({"max_steps": 6}, 0, [4]),
    ],
)
def test_a_training_that_stops_early_validates_its_last_step(
    tmp_path: Path, settings: Any, batch: int, validated: list[int]
) -> None:
    checkpoint, module = ModelCheckpoint("1 epochs", "val"), Validates()
    callbacks = [StopsAt(batch), *([checkpoint] if validated else [])]
    result = fit(tmp_path, **{"max_epochs": 9, "callbacks": callbacks, **settings}).run(module, ones(4), ones(1))
    assert module.validated == validated
    if validated:
        assert checkpoint.scores[result.step] == (None if "max_steps" in settings else -result.step)


def on_two_ranks(folder: str) -> list[Any]:
    """Rank 1 alone asks to stop at its second batch; the minimum is five steps, then two epochs of four. The last run goes on from step 3."""
    reached = []
    for settings in ({"min_steps": 5}, {"min_epochs": 2}):
        callback = StopsAt(2 if os.environ["RANK"] == "1" else 0)
        result = fit(folder, devices="auto", max_epochs=9, callbacks=callback, **settings).run(Weight(), ones(8))
        reached.append((result.step, result.status))
    callbacks = [StopsAt(2 if os.environ["RANK"] == "1" else 0), ModelCheckpoint(1, save_top_k=-1)]
    fit(f"{folder}/saved", devices="auto", min_steps=5, max_epochs=2, callbacks=callbacks).run(Weight(), ones(8))
    where = f"{folder}/saved/checkpoints/step=00000003"
    result = fit(f"{folder}/resumed", devices="auto", min_steps=5, max_epochs=9).run(Weight(), ones(8), resume=where)
    reached.append((result.step, result.status))
    return [reached, killed_on_two_ranks(Path(folder))]


def killed_on_two_ranks(folder: Path) -> list[Any]:
    """Rank 1 alone has asked to stop at step 2, and the run is killed before its end, which rank 0 plants; then it is resumed, twice."""
    saves = ModelCheckpoint(100)
    callbacks = [StopsAt(2 if os.environ["RANK"] == "1" else 0), saves]
    stopped = fit(folder / "killed", devices="auto", max_epochs=9, callbacks=callbacks).run(Logs(), ones(8), ones(2))
    record = folder / "killed" / "run.json"
    if os.environ["RANK"] == "0":
        values = json.loads(record.read_text())
        assert values.pop("ended_at") == [stopped.step]
        record.write_text(json.dumps({**values, "status": "running"}))
    reached = []
    for epochs in (9, 3):
        again = fit(folder / "killed", devices="auto", max_epochs=epochs, callbacks=ModelCheckpoint(100))
        result = again.run(Logs(), ones(8), ones(2), resume="last")
        reached.append((result.step - stopped.step, result.status))
    return reached


def test_ranks_reach_the_minimum_together(tmp_path: Path) -> None:
    reached, killed = [[5, "stopped"], [8, "stopped"], [5, "stopped"]], [[0, "stopped"], [12 - 2, "completed"]]
    assert ranks_of(on_two_ranks, 2, tmp_path) == 2 * [[reached, killed]]
    # The ranks that saved are not those that resume: rank 0 takes over what rank 1 has asked for.
    where = tmp_path / "saved" / "checkpoints" / "step=00000003"
    alone = fit(tmp_path / "alone", min_steps=5, max_epochs=9).run(Weight(), ones(8), resume=where)
    assert (alone.step, alone.stop_reason) == (5, "enough")
