from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.toys import Weight, fit, ones

from callbacks import BatchValidation, EarlyStopping, ModelCheckpoint


@pytest.mark.parametrize(
    ("arguments", "scores", "checks"),
    [
        ({"patience": 3}, [1.0, 0.9, 0.95, 0.93, 0.9, 0.1], 5),  # best at check 2; checks 3, 4, 5 are not better
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.95, 0.1], 2),  # 0.05 better is not 0.1 better
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.85, 0.8, 0.1], 3),
        ({"patience": 2, "mode": "max"}, [0.1, 0.5, 0.4, 0.5, 0.9], 4),
        ({"patience": 2}, [1.0, 1.1, 0.9, 0.95, 0.8, 0.7], 6),  # an improvement restarts the count
        ({"patience": 0}, [1.0, 0.9, 0.95, 0.1], 3),
        ({"patience": 9}, [1.0, math.nan, 0.1], 2),
        ({"patience": 9}, [1.0, math.inf, 0.1], 2),
        ({"patience": 1, "check_finite": False}, [math.nan, 0.5, 0.1], 1),
        ({"patience": 9, "stopping_threshold": 0.5}, [1.0, 0.5, 0.4, 0.1], 3),  # better than, not equal to
        ({"patience": 9, "divergence_threshold": 2.0}, [1.0, 2.0, 2.1, 0.1], 3),
        ({"patience": 9, "mode": "max", "stopping_threshold": 0.9}, [0.1, 0.95, 0.96], 2),
        ({"patience": 9, "mode": "max", "divergence_threshold": 0.2}, [0.5, 0.1, 0.9], 2),
        ({"patience": 3}, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 6),  # improves to the end
        ({"patience": 1}, [0.3333333333, 0.333333333, 0.1], 2),  # the same in float32
        (
            {"patience": 1, "min_delta": 0.1},
            [0.8, 0.7, 0.1],
            2,
        ),  # so is 0.7 + 0.1; 0.8 - 0.1 is more than 0.7 in float64
    ],
)
def test_number_of_checks_until_the_stop(make_fit, scripted, batches, arguments, scores, checks):
    module = scripted(scores)
    stopping = EarlyStopping("score", **arguments)
    result = make_fit(max_epochs=6, callbacks=[stopping]).run(module, batches, batches)
    assert module.validations == checks
    assert result.step == 4 * checks
    if checks < 6:
        assert result.status == "stopped"
        assert "score" in result.stop_reason
        assert stopping.stopped_epoch == checks - 1
    else:
        assert result.status == "completed"
        assert stopping.stopped_epoch is None


def test_missing_monitor_names_the_metrics_there_are(make_fit, scripted, batches):
    with pytest.raises(ValueError, match=r"scoer.*logged so far: .*score"):
        make_fit(max_epochs=2, callbacks=[EarlyStopping("scoer")]).run(scripted([1.0]), batches, batches)


def test_without_validation_it_checks_at_the_end_of_each_epoch(make_fit, scripted, batches):
    # The weight falls by 1 a step, its epoch mean by 4 an epoch: with mode="max" the second epoch is not better.
    stopping = EarlyStopping("train/weight", mode="max", patience=1)
    result = make_fit(max_epochs=5, log_every_n_steps=1, callbacks=[stopping]).run(scripted(), batches)
    assert result.step == 8


class Falls(Weight):
    """Logs the number of the step, from 0 on; ``options`` are those of ``log``."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(len(self.losses)), **self.options)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("on_step", [False, True])
def test_it_checks_the_value_of_the_epoch_that_ends(tmp_path: Path, on_step: bool, validates: bool) -> None:
    # Means of 0 to 3, 4 to 7: the second is more than 4.
    stopping = EarlyStopping("number", divergence_threshold=4.0, patience=9)
    module, val = Falls(on_step=on_step, on_epoch=True), ones(1) if validates else None
    result = fit(tmp_path, max_epochs=5, callbacks=[stopping]).run(module, ones(4), val)
    assert (result.step, stopping.best_score) == (8, 1.5)


@pytest.mark.parametrize("on_epoch", [False, True])
def test_within_an_epoch_it_checks_the_latest_step(tmp_path: Path, on_epoch: bool) -> None:
    stopping = EarlyStopping("number", divergence_threshold=2.5, patience=9)
    settings = fit(tmp_path, max_epochs=5, val_every="2 steps", log_every_n_steps=50, callbacks=[stopping])
    result = settings.run(Falls(on_step=True, on_epoch=on_epoch), ones(40), ones(1))
    assert (result.step, stopping.best_score) == (4, 1.0)


def test_the_sanity_check_does_not_count(make_fit, scripted, batches):
    module = scripted([0.0, 1.0, 0.9, 0.8])  # number 0 is the sanity check: it would be the best forever
    make_fit(max_epochs=3, num_sanity_val_steps=1, callbacks=[EarlyStopping("score", patience=1)]).run(
        module, batches, batches
    )
    assert module.validations == 4


def test_state_goes_on_where_it_was(make_fit, scripted, batches):
    first = EarlyStopping("score", patience=3)
    make_fit(max_epochs=3, callbacks=[first]).run(scripted([0.5, 0.6, 0.7]), batches, batches)
    assert (first.wait_count, first.best_score) == (2, 0.5)
    second = EarlyStopping("score", patience=3)
    second.load_state_dict(first.state_dict())
    module = scripted([0.6, 0.1])
    make_fit(max_epochs=3, callbacks=[second]).run(module, batches, batches)
    assert module.validations == 1


def test_fast_dev_run_does_not_stop(make_fit, scripted, batches):
    result = make_fit(fast_dev_run=True, callbacks=[EarlyStopping("score")]).run(scripted([math.nan]), batches, batches)
    assert result.status == "completed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"mode": "mix"}, "mode='mix'"), ({"patience": -1}, "patience=-1"), ({"min_delta": -0.5}, "min_delta=-0.5")],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping("score", **arguments)


def test_a_metric_that_is_not_logged_yet_may_be_waited_for(tmp_path):
    module = Weight()
    stop = EarlyStopping("never", strict=False)
    fit(tmp_path, max_epochs=2, callbacks=[stop]).run(module, ones(2), ones(1))
    assert len(module.losses) == 4
    with pytest.raises(ValueError, match="this metric was not logged"):
        fit(tmp_path, max_epochs=2, callbacks=[EarlyStopping("never")]).run(Weight(), ones(2), ones(1))


@pytest.mark.parametrize(
    "settings", [{"val_every": 0.25}, {"callbacks": BatchValidation(1)}, {"callbacks": BatchValidation(5, None)}]
)
def test_each_validation_within_an_epoch_is_a_check(make_fit, scripted, batches, settings):
    # Best at the second validation; the third, fourth and fifth are not better.
    module, stopping = scripted([5.0, 1.0, 3.0, 4.0, 5.0, 0.0]), EarlyStopping("score", patience=3)
    callbacks = [settings["callbacks"]] if "callbacks" in settings else []
    result = make_fit(max_epochs=9, **{**settings, "callbacks": [*callbacks, stopping]}).run(module, batches, batches)
    assert (module.validations, stopping.wait_count, stopping.best_score) == (5, 3, 1.0)
    assert result.step == (25 if settings.get("callbacks") and callbacks[0].interval == 5 else 5)


@pytest.mark.parametrize(
    ("scores", "threshold", "epochs", "stopped"),
    [
        ([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], None, 5, 4),
        ([1.0, 2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], None, 8, None),  # it has recovered
        ([1.0, 2.0, 0.9, 0.8, 0.7, 0.7, 0.5, 0.4], None, 6, 5),  # and worsens again
        ([1.0, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0], 0.5, 5, 4),
        ([1.0, 0.1, 0.9, 0.05, 0.04, 0.03, 0.02, 0.0], 0.09, 5, 4),
    ],
)
@pytest.mark.parametrize("killed_after", [None, 2, 3])
def test_a_stop_waits_for_the_minimum_also_in_a_resumed_run(
    make_fit, scripted, batches, tmp_path, scores, threshold, epochs, stopped, killed_after
):
    """``killed_after``: the epoch from whose checkpoint another run goes on."""

    def run(resume: Any = None, done: int = 0, **settings: Any) -> Any:
        stopping = EarlyStopping("score", patience=1, stopping_threshold=threshold)
        callbacks = [stopping, ModelCheckpoint("1 epochs", save_top_k=-1)]
        fit = make_fit(min_epochs=5, **{"max_epochs": 8, "callbacks": callbacks, **settings})
        return fit.run(scripted(scores[done:]), batches, batches, resume=resume), stopping

    if killed_after is None:
        result, stopping = run()
    else:
        run()
        result, stopping = run(tmp_path / "checkpoints" / f"step={4 * killed_after:08d}", killed_after)
    assert (result.epoch, stopping.stopped_epoch) == (epochs, stopped)
    assert result.status == ("completed" if epochs == 8 else "stopped")
