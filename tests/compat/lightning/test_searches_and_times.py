"""``Timer``, ``OnExceptionCheckpoint``, ``Tuner`` and the finders: expected values from Lightning, or from this library's own searches."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer

import callbacks as own
from engine.interop.lightning.tuner import Tuner


@pytest.mark.parametrize("duration", ["00:00:00:00", {"seconds": 0}, timedelta(0)])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_timer_that_is_over(duration: Any, interval: str, tmp_path: Path) -> None:
    def ask(L: Any) -> Any:
        timer = L.callbacks.Timer(duration, interval)
        used = trainer(L, tmp_path / ("door" if L is OURS else "lightning"), callbacks=[timer], max_epochs=5)
        used.fit(module(L), data())
        return [used.should_stop, used.global_step, timer.time_remaining() <= 0]

    assert quietly(ask, OURS)[0] is True
    assert quietly(ask, OURS)[2] == quietly(ask, THEIRS)[2] is True


def test_a_timer_ends_the_training_after_its_time(tmp_path: Path) -> None:
    timer = OURS.callbacks.Timer(timedelta(seconds=0.2), verbose=False)
    used = trainer(OURS, tmp_path, callbacks=[timer], max_epochs=100_000)
    used.fit(module(OURS), data())
    assert 0.2 <= timer.time_elapsed("train") < 20
    assert used.should_stop
    assert timer.start_time("train") < timer.end_time("train")
    assert (timer.start_time("test"), timer.time_elapsed("test")) == (None, 0.0)
    later = OURS.callbacks.Timer("00:00:00:01")
    later.load_state_dict(timer.state_dict())
    assert later.time_elapsed() == pytest.approx(timer.time_elapsed())
    assert later.time_remaining() == pytest.approx(1 - timer.time_elapsed())


def test_a_timer_measures_the_run_under_way() -> None:
    """In Lightning the time of a second training is negative, because it has the end of the first one."""
    timer = OURS.callbacks.Timer(verbose=False)
    timer.on_train_start(None, None)
    timer.on_train_end(None, None)
    timer.on_train_start(None, None)
    assert timer.end_time() is None
    assert timer.time_elapsed() >= 0


def test_a_timer_refuses_what_is_no_time() -> None:
    with pytest.raises(ValueError, match=r"Timer\(duration='100 steps'"):
        OURS.callbacks.Timer("100 steps")
    with pytest.raises(ValueError, match="interval"):
        OURS.callbacks.Timer(interval="batch")


def test_a_checkpoint_after_an_exception(tmp_path: Path) -> None:
    def ask(L: Any) -> Any:
        class Fails(type(module(L))):  # type: ignore[misc]
            fails = True

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                if self.fails and self.current_epoch == 1 and batch_idx == 3:
                    raise RuntimeError("the cause")
                return super().training_step(batch, batch_idx)

        folder = tmp_path / ("door" if L is OURS else "lightning")
        torch.manual_seed(7)
        failing = Fails()
        options = {
            "max_epochs": 2,
            "enable_checkpointing": True,
            "callbacks": [L.callbacks.OnExceptionCheckpoint(folder)],
        }
        with pytest.raises(RuntimeError, match="the cause"):
            trainer(L, folder, **options).fit(failing, data())
        kept = [path.name for path in folder.glob("*.ckpt")]
        torch.manual_seed(7)
        again, used = Fails(), trainer(L, folder, **options)
        again.fails = False
        used.fit(
            again, data(), ckpt_path=folder / "on_exception.ckpt", **({} if L is OURS else {"weights_only": False})
        )
        return [kept, used.global_step, [path.name for path in folder.glob("*.ckpt")]]

    assert quietly(ask, OURS) == quietly(ask, THEIRS) == [["on_exception.ckpt"], 20, []]


def test_a_learning_rate_is_found_and_set(tmp_path: Path) -> None:
    expected = own.find_lr(
        module(OURS), data(), min_lr=1e-4, num_steps=40, early_stop_threshold=None, picture=None
    ).suggestion()
    net = module(OURS)
    found = Tuner(trainer(OURS, tmp_path)).lr_find(net, data(), min_lr=1e-4, num_training=40, early_stop_threshold=None)
    assert found.suggestion() == pytest.approx(expected)
    assert net.hparams.lr == found.suggestion() != 0.05
    finder, other = (
        OURS.callbacks.LearningRateFinder(min_lr=1e-4, num_training_steps=40, early_stop_threshold=None),
        module(OURS),
    )
    used = trainer(OURS, tmp_path / "fit", callbacks=[finder], max_epochs=1)
    used.fit(other, data())
    assert other.hparams.lr == finder.optimal_lr.suggestion() == pytest.approx(expected)
    assert used.lr_scheduler_configs[0].scheduler.base_lrs == [other.hparams.lr]  # configure_optimizers has read it


def test_the_tuner_takes_the_trainer() -> None:
    """As an annotation, too, for type checkers, and under Lightning's paths."""
    assert get_type_hints(Tuner.__init__)["trainer"] is OURS.Trainer
    assert OURS.pytorch.tuner.tuning.Tuner is OURS.tuner.Tuner is Tuner


def test_a_module_of_the_installed_lightning_is_searched_too(tmp_path: Path) -> None:
    net = quietly(module, THEIRS)
    found = Tuner(trainer(OURS, tmp_path)).lr_find(net, data(), min_lr=1e-4, num_training=40, early_stop_threshold=None)
    assert net.hparams.lr == found.suggestion()


def test_no_attribute_for_the_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"have rate: give attr_name, or update_attr=False"):
        Tuner(trainer(OURS, tmp_path)).lr_find(module(OURS), data(), attr_name="rate")
    untouched = module(OURS)
    found = Tuner(trainer(OURS, tmp_path)).lr_find(
        untouched, data(), num_training=20, early_stop_threshold=None, update_attr=False
    )
    assert (untouched.hparams.lr, len(found.results["lr"])) == (0.05, 20)


def test_a_batch_size_is_found_and_set(tmp_path: Path) -> None:
    class Sized(type(module(OURS))):  # type: ignore[misc]
        batch_size = 2

        def train_dataloader(self) -> Any:
            return data(samples=12, batch_size=self.batch_size)

    net = Sized()
    assert Tuner(trainer(OURS, tmp_path)).scale_batch_size(net, steps_per_trial=1) == net.batch_size == 12
    finder, other = OURS.callbacks.BatchSizeFinder(steps_per_trial=1, max_val=8), Sized()
    used = trainer(OURS, tmp_path / "fit", callbacks=[finder], max_epochs=1)
    used.fit(other)
    assert (finder.optimal_batch_size, other.batch_size, used.global_step) == (8, 8, 2)


def test_what_a_search_cannot_do_is_an_error(tmp_path: Path) -> None:
    finder = OURS.callbacks.LearningRateFinder()
    with pytest.raises(ValueError, match="leave one of the two out"):
        Tuner(trainer(OURS, tmp_path, callbacks=[finder])).lr_find(module(OURS), data())
    with pytest.raises(ValueError, match="method='validate'"):
        Tuner(trainer(OURS, tmp_path)).scale_batch_size(module(OURS), method="validate")
    with pytest.raises(ValueError, match="a loader was given, whose batch size cannot be set"):
        Tuner(trainer(OURS, tmp_path)).scale_batch_size(module(OURS), data())
    with pytest.raises(ValueError, match="leave it out, or ckpt_path"):
        trainer(OURS, tmp_path, callbacks=[finder]).fit(module(OURS), data(), ckpt_path="last")
    with pytest.raises(TypeError, match=r"Milestones\.on_fit_start is not called"):
        type("Milestones", (OURS.callbacks.LearningRateFinder,), {"on_fit_start": lambda self, *args: None})
    from engine import Fit

    with pytest.raises(ValueError, match=r"has not searched: give it to Trainer"):
        Fit(max_epochs=1, accelerator="cpu", callbacks=[finder], root_dir=tmp_path).run(module(OURS), data())
