from __future__ import annotations

import json
import math
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from callbacks import BatchValidation, ModelCheckpoint
from engine import Callback, TrainModule
from engine.checkpoint.json_tree import pack

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")


def steps_in(root):
    return sorted(int(path.name.removeprefix("step=")) for path in (root / "checkpoints").glob("step=*"))


def weight_in(checkpoint):
    return load_file(checkpoint / "rank=00000.safetensors")["model/weight"].item()


def path(root, step):
    return root / "checkpoints" / f"step={step:08d}"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"save_top_k": -1}, [4, 8, 12]),
        ({}, [12]),
        ({"save_top_k": 2}, [8, 12]),
        ({"every": "2 epochs", "save_top_k": -1}, [8, 12]),  # and the end
        ({"every": 5, "save_top_k": -1}, [5, 10, 12]),
        ({"every": "5 steps", "save_top_k": -1}, [5, 10, 12]),
        ({"every": "0.5 epochs", "save_top_k": -1}, [2, 4, 6, 8, 10, 12]),
        ({"every": None, "save_top_k": -1}, [12]),
        ({"every": "0.001 s", "save_top_k": -1}, list(range(1, 13))),
    ],
)
def test_when_without_monitor(make_fit, scripted, batches, tmp_path, arguments, kept):
    class Slow(scripted):
        def training_step(self, batch, batch_idx):
            time.sleep(0.002)
            return super().training_step(batch, batch_idx)

    result = make_fit(max_epochs=3, callbacks=[ModelCheckpoint(**arguments)]).run(Slow(), batches)
    assert steps_in(tmp_path) == kept
    assert result.last_checkpoint == path(tmp_path, 12)
    assert result.best_checkpoint is None
    assert weight_in(result.last_checkpoint) == -12.0


def test_a_window_is_not_cut(make_fit, scripted, batches, tmp_path):
    callback = ModelCheckpoint(every="0.000001 s", save_top_k=-1)
    make_fit(max_epochs=1, accumulate_grad_batches=4, callbacks=[callback]).run(scripted(), batches * 2)
    assert steps_in(tmp_path) == [1, 2]
    assert weight_in(path(tmp_path, 1)) == -1.0


@pytest.mark.parametrize(
    ("arguments", "scores", "kept", "best"),
    [
        ({}, [0.3, 0.1, 0.2, 0.4], [8, 16], 8),
        ({"mode": "max"}, [0.3, 0.1, 0.2, 0.4], [16], 16),
        ({"save_last": False}, [0.3, 0.1, 0.2, 0.4], [8], 8),
        ({"save_top_k": 2, "save_last": False}, [0.3, 0.1, 0.2, 0.4], [8, 12], 8),
        ({"save_top_k": 2}, [0.3, 0.1, 0.2, 0.4], [8, 12, 16], 8),
        ({"save_top_k": 0}, [0.3, 0.1, 0.2, 0.4], [16], 16),
        ({"save_last": False}, [math.nan, 0.5, math.nan, 0.6], [8], 8),
        ({"save_last": False, "mode": "max"}, [math.nan, 0.5, math.nan, 0.4], [8], 8),
        ({"save_last": False}, [math.nan, math.inf, math.nan, math.nan], [8], 8),
        ({"save_last": False}, [0.5, 0.5, 0.5, 0.5], [4], 4),
        ({}, [math.nan] * 4, [4, 16], None),
    ],
)
def test_best_and_last(make_fit, scripted, batches, tmp_path, arguments, scores, kept, best):
    callback = ModelCheckpoint(monitor="score", **arguments)
    result = make_fit(max_epochs=4, callbacks=[callback]).run(scripted(scores), batches, batches)
    assert steps_in(tmp_path) == kept
    assert result.best_checkpoint == (None if best is None else path(tmp_path, best))
    assert result.last_checkpoint == path(tmp_path, kept[-1])
    if best is not None:
        assert weight_in(result.best_checkpoint) == -best


def test_what_would_be_removed_at_once_is_not_written(make_fit, scripted, batches):
    saves = Saves()
    callback = ModelCheckpoint(monitor="score", save_last=False)
    make_fit(max_epochs=4, callbacks=[callback, saves]).run(scripted([0.3, 0.1, 0.2, 0.4]), batches, batches)
    assert saves.steps == [4, 8]


def test_a_score_belongs_to_the_weights_that_it_was_measured_on(make_fit, scripted, batches, tmp_path):
    # Validation at steps 3, 6, 9, 12; due at 2, 4, 6, ...: saved when due, and none takes an older score; the next validation is saved with its own.
    callback = ModelCheckpoint(every=2, monitor="score", save_top_k=-1)
    make_fit(max_steps=11, max_epochs=3, val_every="3 steps", callbacks=[callback]).run(
        scripted([0.3, 0.1, 0.2]), batches, batches
    )
    assert callback.scores == {2: None, 3: 0.3, 4: None, 6: 0.1, 8: None, 9: 0.2, 10: None, 11: None}
    assert steps_in(tmp_path) == [2, 3, 4, 6, 8, 9, 10, 11]
    manifest = json.loads((path(tmp_path, 6) / "manifest.json").read_text())
    assert manifest["metrics"]["score"] == 0.1


@pytest.mark.parametrize("monitor", [None, "score"])
def test_it_saves_as_often_with_a_monitor(make_fit, scripted, batches, monitor):
    # Epochs of 4 steps, validation at their ends: what is due in between is saved at once, what is due there once, with its score.
    saves = Saves()
    callback = ModelCheckpoint("2 steps", monitor, save_top_k=-1)
    result = make_fit(max_epochs=4, callbacks=[callback, saves]).run(scripted([0.3, 0.1, 0.2, 0.4]), batches, batches)
    assert saves.steps == [2, 4, 6, 8, 10, 12, 14, 16]
    if monitor is not None:
        assert callback.scores == {2: None, 4: 0.3, 6: None, 8: 0.1, 10: None, 12: 0.2, 14: None, 16: 0.4}
        assert result.best_checkpoint.name == "step=00000008"


def test_the_newest_without_a_score_is_kept_until_there_is_one(make_fit, scripted, batches, tmp_path):
    class Kept(Callback):
        seen = []

        def on_train_batch_start(self, run, module, batch, batch_idx):
            self.seen.append(list(callback.scores))

    callback = ModelCheckpoint("2 steps", "score", save_last=False)
    make_fit(max_steps=8, val_every="5 steps", callbacks=[callback, Kept()]).run(scripted([0.3]), batches, batches)
    assert Kept.seen == [[], [], [2], [2], [4], [5], [5], [5]]


def test_a_name_with_a_metric_waits_for_the_metric(make_fit, scripted, batches, tmp_path):
    callback = ModelCheckpoint("1 steps", "score", save_top_k=-1, filename="{step}-{score:.1f}")
    make_fit(max_steps=5, val_every="2 steps", callbacks=[callback]).run(scripted([0.3, 0.1]), batches, batches)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step=00000001", "2-0.3", "step=00000003", "4-0.1", "step=00000005"}


@pytest.mark.parametrize(
    ("every", "scores"),
    [
        ("1 epochs", {3: 0.1, 5: 0.2, 6: 0.15}),
        ("2 epochs", {5: 0.2, 6: 0.15}),
        (None, {6: 0.15}),
        ("4 steps", {4: 0.4, 6: 0.15}),
    ],
)
@pytest.mark.parametrize("in_batches", [False, True])
def test_validations_within_an_epoch_count(make_fit, scripted, batches, every, scores, in_batches):
    callback = ModelCheckpoint(every, "score", save_top_k=3)
    extra, val_every = ([BatchValidation(1)], None) if in_batches else ([], 0.25)
    result = make_fit(max_steps=6, val_every=val_every, callbacks=[*extra, callback]).run(
        scripted([0.5, 0.3, 0.1, 0.4, 0.2, 0.15]), batches, batches
    )
    assert callback.scores == scores
    assert callback.best_model_score == min(scores.values())
    assert result.best_checkpoint.name == f"step={min(scores, key=scores.get):08d}"


def test_a_validation_at_which_nothing_is_due_saves_nothing(make_fit, scripted, batches, tmp_path):
    callback = ModelCheckpoint(every=6, monitor="score", save_top_k=-1)
    make_fit(max_epochs=3, val_every="3 steps", callbacks=[callback]).run(
        scripted([0.3, 0.1, 0.2, 0.4]), batches, batches
    )
    assert callback.scores == {6: 0.1, 12: 0.4}
    assert steps_in(tmp_path) == [6, 12]


def test_two_of_them_share_a_folder(make_fit, scripted, batches, tmp_path):
    best = ModelCheckpoint(monitor="score", save_last=False)
    often = ModelCheckpoint(every=1)
    result = make_fit(max_epochs=3, callbacks=[best, often]).run(scripted([0.2, 0.1, 0.3]), batches, batches)
    assert steps_in(tmp_path) == [8, 12]
    assert result.best_checkpoint == path(tmp_path, 8)
    assert result.last_checkpoint == path(tmp_path, 12)


def test_missing_monitor_names_the_metrics_there_are(make_fit, scripted, batches):
    with pytest.raises(ValueError, match=r"scoer.*logged so far: .*score"):
        make_fit(callbacks=[ModelCheckpoint(monitor="scoer")]).run(scripted([1.0]), batches, batches)


def test_without_validation_the_score_is_what_training_logged(make_fit, scripted, batches, tmp_path):
    callback = ModelCheckpoint(monitor="train/weight", mode="max", save_last=False)
    result = make_fit(max_epochs=3, log_every_n_steps=1, callbacks=[callback]).run(scripted(), batches)
    assert steps_in(tmp_path) == [4]
    assert result.best_checkpoint == path(tmp_path, 4)


@pytest.mark.parametrize("log_every_n_steps", [50, 1, 0])
def test_between_log_boundaries_the_score_and_the_name_are_those_of_the_step(
    make_fit, scripted, batches, tmp_path, log_every_n_steps
):
    class Falls(scripted):
        def training_step(self, batch, batch_idx):
            self.log("falls", 12.0 - self.run.step if self.run.step < 9 else 50.0)
            if batch_idx % 2 == 0:
                self.log("even", self.run.step, on_epoch=True)
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint("3 steps", "falls", save_top_k=-1, filename="{step}-{falls:.0f}-{even:.0f}")
    fit = make_fit(max_epochs=3, log_every_n_steps=log_every_n_steps, callbacks=[callback])
    result = fit.run(Falls(), batches)
    assert callback.scores == {3: 10.0, 6: 7.0, 9: 4.0, 12: 50.0}
    assert list(callback.names.values()) == ["3-10-2", "6-7-4", "9-4-8", "12-50-10"]
    assert result.best_checkpoint == tmp_path / "checkpoints" / "9-4-8"


def test_the_others_come_first(make_fit, scripted, batches, tmp_path):
    class Looks(Callback):
        def on_train_epoch_end(self, run, module):
            self.seen = steps_in(tmp_path)

        def state_dict(self):
            return {"seen": self.seen}

    looks = Looks()
    make_fit(callbacks=[ModelCheckpoint(), looks]).run(scripted(), batches)
    assert looks.seen == []
    assert steps_in(tmp_path) == [4]


class Failing(Callback):
    def __init__(self, error, step=6):
        self.error = error
        self.step = step

    def on_train_batch_start(self, run, module, batch, batch_idx):
        if run.step == self.step:
            raise self.error


class Saves(Callback):
    def __init__(self):
        self.steps = []

    def on_save_checkpoint(self, run, module, checkpoint):
        self.steps.append(run.step)


@pytest.mark.parametrize("error", [RuntimeError("as planned"), KeyboardInterrupt()])
def test_an_error_leaves_the_last_step(make_fit, scripted, batches, tmp_path, error):
    with pytest.raises(type(error)):
        make_fit(max_epochs=3, callbacks=[ModelCheckpoint(), Failing(error)]).run(scripted(), batches)
    assert 6 in steps_in(tmp_path)
    assert weight_in(path(tmp_path, 6)) == -6.0


def test_the_checkpoint_of_an_error_has_the_name_of_its_step(make_fit, scripted, batches, tmp_path):
    class Falls(scripted):
        def training_step(self, batch, batch_idx):
            self.log("falls", 12.0 - self.run.step)
            return super().training_step(batch, batch_idx)

    saving = ModelCheckpoint(filename="{step}-{falls:.0f}")
    with pytest.raises(RuntimeError, match="as planned"):
        make_fit(callbacks=[saving, Failing(RuntimeError("as planned"))], max_epochs=3).run(Falls(), batches)
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["4-9", "6-7"]


@pytest.mark.parametrize(("step", "saved"), [(6, [6]), (0, [])])
def test_an_error_where_nothing_is_new_saves_nothing(make_fit, scripted, batches, tmp_path, step, saved):
    saves = Saves()
    with pytest.raises(RuntimeError, match="as planned"):
        make_fit(
            callbacks=[ModelCheckpoint(every=6), saves, Failing(RuntimeError("as planned"), step)], max_epochs=3
        ).run(scripted(), batches)
    assert saves.steps == saved


def test_a_full_disk_does_not_hide_the_error(make_fit, scripted, batches, tmp_path, caplog):
    class FullDisk(Callback):
        def on_save_checkpoint(self, run, module, checkpoint):
            raise OSError(28, "No space left on device")

    callbacks = [ModelCheckpoint(every=None), FullDisk(), Failing(RuntimeError("as planned"))]
    with pytest.raises(RuntimeError, match="as planned"):
        make_fit(max_epochs=3, callbacks=callbacks).run(scripted(), batches)
    assert "No space left" in caplog.text


def test_resuming_goes_on_with_the_scores(make_fit, scripted, batches, tmp_path):
    make_fit(max_epochs=2, callbacks=[ModelCheckpoint(monitor="score")]).run(scripted([0.1, 0.2]), batches, batches)
    assert steps_in(tmp_path) == [4, 8]
    callback = ModelCheckpoint(monitor="score")
    fit = make_fit(max_epochs=4, callbacks=[callback])
    result = fit.run(scripted([0.3, 0.4]), batches, batches, resume=path(tmp_path, 8))
    assert steps_in(tmp_path) == [4, 8, 16]  # what it was resumed from stays
    assert callback.scores == {4: 0.1, 16: 0.4}
    assert result.best_checkpoint == path(tmp_path, 4)
    assert weight_in(result.last_checkpoint) == -16.0
    make_fit(max_epochs=5, callbacks=[ModelCheckpoint(monitor="score")]).run(
        scripted([0.5]), batches, batches, resume="last"
    )
    assert steps_in(tmp_path) == [4, 16, 20]  # until a run continues from another one


@pytest.mark.parametrize("save_top_k", [-1, 2])
def test_a_damaged_checkpoint_is_not_the_best_of_a_resumed_run(make_fit, scripted, batches, tmp_path, save_top_k):
    def callbacks():
        return [ModelCheckpoint(monitor="score", save_top_k=save_top_k)]

    make_fit(max_epochs=3, callbacks=callbacks()).run(scripted([0.1, 0.2, 0.3]), batches, batches)
    (path(tmp_path, 4) / "rank=00000.safetensors").write_bytes(b"")
    (checkpoint,) = resumed = callbacks()
    result = make_fit(max_epochs=4, callbacks=resumed).run(scripted([0.4]), batches, batches, resume="auto")
    assert result.best_checkpoint == path(tmp_path, 8)
    kept = {8: 0.2, 12: 0.3, 16: 0.4}
    assert checkpoint.scores == kept  # save_last keeps 16


@pytest.mark.parametrize("monitor", [None, "score"])
def test_a_checkpoint_has_a_few_bytes_for_each_that_is_kept(monitor):
    callback = ModelCheckpoint(monitor=monitor, save_top_k=-1)
    callback.scores = {step: step / 7 if monitor else None for step in range(10_000, 11_000)}
    callback.names = {step: f"step={step:08d}" for step in callback.scores} | {10_500: "step=00010500-v1"}
    callback.permanent = {10_700}
    state = callback.state_dict()
    assert len(json.dumps(pack(state)[0])) < 1000 * (30 if monitor else 8)
    earlier = {**state, "scores": dict(callback.scores), "names": dict(callback.names)}
    del earlier["steps"]
    for form in (state, earlier):
        other = ModelCheckpoint(monitor=monitor, save_top_k=-1)
        other.load_state_dict(form)
        assert (other.scores, other.names, other.permanent) == (callback.scores, callback.names, {10_700})


def test_a_run_with_nothing_to_do_saves_nothing(make_fit, scripted, batches, tmp_path):
    make_fit(max_epochs=0, callbacks=[ModelCheckpoint()]).run(scripted(), batches)
    assert not (tmp_path / "checkpoints").exists()


def test_fast_dev_run_saves_nothing(make_fit, scripted, batches, tmp_path):
    make_fit(fast_dev_run=2, callbacks=[ModelCheckpoint(every=1)]).run(scripted(), batches)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "avg"}, "mode='avg'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": True}, "save_top_k=True"),
        ({"save_top_k": 0, "save_last": False}, "keep no checkpoint"),
        ({"every": "5 apples"}, "apples"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


class Noisy(TrainModule):
    """Weights that depend on data order, random numbers, momentum and both kinds of scheduler."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


@pytest.mark.parametrize("monitor", [None, "score"])
@pytest.mark.parametrize("window", [1, 2])
def test_from_each_checkpoint_the_run_ends_in_the_same_weights(make_fit, tmp_path, monitor, window):
    data = TensorDataset(torch.randn(10, 2, generator=torch.Generator().manual_seed(1)))

    def run(root, resume=None):
        module = Noisy()
        callback = ModelCheckpoint(every=1, monitor=monitor, save_top_k=-1)
        fit = make_fit(
            max_epochs=3,
            accumulate_grad_batches=window,
            seed=7,
            root_dir=root,
            val_every="0.5 epochs",
            callbacks=[callback],
        )
        loaders = DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=5)
        result = fit.run(module, *loaders, resume=resume)
        return result, [parameter.detach().clone() for parameter in module.parameters()]

    whole, expected = run(tmp_path / "whole")
    steps = steps_in(tmp_path / "whole")
    assert len(steps) >= 6
    for step in steps:
        result, weights = run(tmp_path / f"from{step}", path(tmp_path / "whole", step))
        assert (step, result.step, result.epoch) == (step, whole.step, whole.epoch)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True)), f"resumed from step {step}"
        assert result.metrics["loss"] == whole.metrics["loss"], f"resumed from step {step}"
