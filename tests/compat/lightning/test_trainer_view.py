"""``self.trainer``: counters, limits, values and objects of a run, beside Lightning's own ``Trainer`` where it knows them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of, run_script
from support.toys import Weight, fit, ones
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from callbacks import BatchValidation, CSVLogger, EarlyStopping, ModelCheckpoint
from engine import Callback, DataModule, Fit, Resume, TrainModule
from engine.compat.lightning.trainer import Trainer


class Asks(Weight):
    """Asks in each of its events."""

    def __init__(self, ask: Any, *events: str) -> None:
        super().__init__()
        self.asked: dict[str, list[Any]] = {name: [] for name in events}
        for name in events:
            setattr(self, name, lambda *args, name=name: self.asked[name].append(ask(self.trainer)))


def answers(root: Path, ask: Any, event: str = "on_train_start", loader: Any = None, **settings: Any) -> list[Any]:
    module = Asks(ask, event)
    fit(root, **settings).run(module, ones(4) if loader is None else loader, ones(2))
    return module.asked[event]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "accumulate_grad_batches": {0: 1, 2: 4}}, 9),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 20_000, "max_steps": 1}, 1),
        ({"max_steps": 7}, 7),
        ({"fast_dev_run": 2}, 2),
        ({"overfit_batches": 1, "max_epochs": 2}, 2),
    ],
)
def test_the_steps_of_the_whole_training(tmp_path: Path, settings: dict[str, Any], steps: int) -> None:
    module = Asks(lambda trainer: (trainer.estimated_stepping_batches, module.run.total_steps), "setup", "on_fit_start")
    made = []
    module.configure_optimizers = lambda: (  # type: ignore[method-assign]
        made.append(module.trainer.estimated_stepping_batches), torch.optim.SGD(module.parameters(), lr=1.0)
    )[1]  # fmt: skip
    result = fit(tmp_path, **settings).run(module, ones(4), ones(1))
    assert module.asked["setup"] == module.asked["on_fit_start"] == [(steps, steps)]
    assert (made, result.step) == ([steps], steps)


def test_steps_of_a_global_batch(tmp_path: Path) -> None:
    loader = DataLoader(torch.ones(10, 1), batch_size=2)
    assert answers(tmp_path, lambda t: t.estimated_stepping_batches, loader=loader, global_batch_size=4) == [3]


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.ones(3, 1))


def test_steps_without_a_length(tmp_path: Path) -> None:
    def ask(trainer: Any) -> Any:
        with pytest.raises(ValueError, match=r"is_last_batch: DataLoader has no length"):
            _ = trainer.is_last_batch
        try:
            return trainer.estimated_stepping_batches, trainer.num_training_batches
        except ValueError as error:
            return str(error)

    loader = DataLoader(Endless())
    assert "give Fit(max_steps=...)" in answers(tmp_path, ask, loader=loader)[0]
    assert answers(tmp_path, ask, loader=loader, max_steps=2) == [(2, math.inf)]
    assert answers(tmp_path, lambda t: t.estimated_stepping_batches, max_time="0.01 s", min_steps=1) == [math.inf]


def test_limits_and_settings(tmp_path: Path) -> None:
    def ask(t: Any) -> list[Any]:
        return [
            t.max_epochs, t.max_steps, t.min_epochs, t.num_training_batches, t.num_val_batches, t.num_test_batches,
            t.accumulate_grad_batches, t.precision, t.gradient_clip_val, t.limit_train_batches, t.limit_val_batches, t.log_every_n_steps,
            t.is_global_zero, t.global_rank, t.local_rank, t.node_rank, t.world_size, t.num_devices, t.num_nodes, t.strategy.root_device.type,
        ]  # fmt: skip

    found = answers(tmp_path, ask, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=1, gradient_clip_val=9.0)
    assert found == [[2, -1, None, 4, [1], [], 2, "32-true", 9.0, 1.0, 1, 50, True, 0, 0, 0, 1, 1, 1, "cpu"]]
    assert answers(tmp_path, lambda t: (t.max_epochs, t.max_steps), max_steps=3) == [(-1, 3)]


@pytest.mark.parametrize(
    ("val_every", "found"), [("2 epochs", (2, 1.0)), (0.5, (1, 0.5)), ("3 steps", (None, 6)), (None, (None, None))]
)
def test_when_validations_come(tmp_path: Path, val_every: Any, found: Any) -> None:
    def ask(t: Any) -> Any:
        try:
            return t.check_val_every_n_epoch, t.val_check_interval
        except ValueError as error:
            assert "val_every=None" in str(error)  # noqa: PT017
            return None, None

    assert answers(tmp_path, ask, val_every=val_every, accumulate_grad_batches=2) == [found]


@pytest.mark.parametrize("asked", [(2, 1), (0.5, 2), (7, None)])
def test_when_validations_come_that_count_batches(tmp_path: Path, asked: Any) -> None:
    def ask(t: Any) -> Any:
        return t.val_check_interval, t.check_val_every_n_epoch

    assert answers(tmp_path, ask, callbacks=BatchValidation(*asked), val_every=None) == [asked]
    trainer = Trainer(val_check_interval=asked[0], check_val_every_n_epoch=asked[1], logger=False)
    assert ask(trainer) == asked


def test_where_the_run_is(tmp_path: Path) -> None:
    events = (
        "on_fit_start", "on_sanity_check_start", "on_train_batch_start", "on_validation_epoch_end", "on_train_epoch_end",
        "on_test_start", "on_predict_start",
    )  # fmt: skip

    def ask(t: Any) -> Any:
        flags = "training", "validating", "testing", "predicting", "sanity_checking", "evaluating"
        return t.state.fn, t.state.stage, [name for name in flags if getattr(t, name)], t.current_epoch, t.global_step

    module = Asks(ask, *events)
    one = fit(tmp_path, num_sanity_val_steps=1)
    one.run(module, ones(1), ones(1))
    one.test(module, ones(1))
    one.predict(module, ones(1))
    check = ("fit", "sanity_check", ["sanity_checking", "evaluating"], 0, 0)
    assert module.asked == {
        "on_fit_start": [("fit", "train", ["training"], 0, 0)],
        "on_sanity_check_start": [check],
        "on_train_batch_start": [("fit", "train", ["training"], 0, 0)],
        "on_validation_epoch_end": [check, ("fit", "validate", ["validating", "evaluating"], 0, 1)],
        "on_train_epoch_end": [("fit", "train", ["training"], 0, 1)],
        "on_test_start": [("test", "test", ["testing", "evaluating"], 1, 1)],
        "on_predict_start": [("predict", "predict", ["predicting"], 1, 1)],
    }


def test_the_last_batch(tmp_path: Path) -> None:
    module = Asks(lambda t: t.is_last_batch, "on_train_batch_start", "on_before_backward", "on_train_batch_end")
    fit(tmp_path, max_epochs=2, accumulate_grad_batches=2).run(module, ones(3))
    assert list(module.asked.values()) == [[False, False, True] * 2] * 3


class Logs(Weight):
    """The names and values of ``callback_metrics`` in each event, for Lightning's module too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def note(self, event: str) -> None:
        read = self.trainer.callback_metrics
        assert all(
            isinstance(value, Tensor) and value.shape == () and value.dtype == torch.float32 for value in read.values()
        )
        shown = {name: value for name, value in self.trainer.progress_bar_metrics.items() if name != "v_num"}
        self.found.append([event, *({name: round(float(v), 5) for name, v in each.items()} for each in (read, shown))])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("plain", loss * 2)
        self.log("late", loss * 3, on_step=False, on_epoch=True)
        return {"loss": loss, "more": batch_idx}

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", (self.w * batch).mean(), prog_bar=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["more"] == batch_idx
        assert set(outputs) == {"loss", "more"}
        self.note(f"batch {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self.log("own", self.w.detach().sum() * 2)
        self.note("validation epoch end")

    def on_validation_end(self) -> None:
        self.note("validation end")

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def on_train_end(self) -> None:
        self.note("end")


def growing() -> list[Tensor]:
    return [torch.full((2, 1), float(i)) for i in range(1, 4)]


def test_values_are_lightnings_in_every_event(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    theirs = run_script(Path(__file__).with_name("lightning_logs_peer.py"), tmp_path, timeout=300, forked=True)
    module = Logs()
    fit(tmp_path, max_epochs=2, log_every_n_steps=2).run(module, growing(), ones(2))
    assert module.found == theirs.value


def test_values_are_copies_to_read(tmp_path: Path) -> None:
    def ask(t: Any) -> Any:
        with pytest.raises(TypeError, match=r"log a value with self.log"):
            t.callback_metrics["x"] = 1
        return copy.deepcopy(t.callback_metrics)

    (found,) = answers(tmp_path, ask, "on_validation_epoch_end")
    assert type(found) is dict
    assert found == {"val": torch.tensor(-4.0)}


def test_a_metric_that_grows_after_its_value_is_an_error(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Grows(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.mean.update(batch)
            self.log("m", self.mean)

        def on_validation_epoch_end(self) -> None:
            assert self.trainer.callback_metrics["m"] == 1.0
            if self.run.stage == "fit":
                self.mean.update(3.0)

    fit(tmp_path).validate(Grows(), ones(2))
    with pytest.raises(ValueError, match=r"logged as 'm' was updated in on_validation_epoch_end, after its value"):
        fit(tmp_path).run(Grows(), ones(1), ones(2))


def test_values_cost_nothing_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.compat.lightning import trainer_view

    monkeypatch.setattr(trainer_view.TrainerView, "__init__", lambda *args: pytest.fail("a view was made"))
    fit(tmp_path).run(Weight(), ones(2), ones(1))


def test_should_stop(tmp_path: Path) -> None:
    class Stops(Weight):
        def on_train_batch_end(self, *args: Any) -> None:
            assert not self.trainer.should_stop
            self.trainer.should_stop = False
            if self.global_step == 2:
                self.trainer.should_stop = True
                assert self.trainer.should_stop
                with pytest.raises(ValueError, match="cannot be taken back"):
                    self.trainer.should_stop = False

    result = fit(tmp_path, max_epochs=5).run(Stops(), ones(4))
    assert (result.step, result.status, result.stop_reason) == (2, "stopped", "trainer.should_stop was set")


def test_objects(tmp_path: Path) -> None:
    class Data(DataModule):
        def setup(self, stage: str) -> None:
            assert self.trainer.max_epochs == 1
            self.loader = DataLoader(torch.ones(4, 1), batch_size=2)

        def train_dataloader(self) -> Any:
            return {"a": self.loader}

        def val_dataloader(self) -> Any:
            return [self.loader, self.loader]

    class Net(Asks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    def ask(t: Any) -> None:
        assert t.datamodule is data
        assert t.train_dataloader == {"a": data.loader}
        assert t.val_dataloaders == [data.loader] * 2
        assert t.test_dataloaders is None
        assert t.model is t.lightning_module is module
        assert t.callbacks == callbacks
        assert (t.logger, t.loggers) == (logger, [logger])
        assert (t.checkpoint_callback, t.checkpoint_callbacks) == (saves, [saves])
        assert (t.early_stopping_callback, t.early_stopping_callbacks) == (early, [early])
        assert t.progress_bar_callback is None
        assert (t.default_root_dir, t.log_dir) == (str(tmp_path), str(tmp_path))
        assert type(t.optimizers[0]) is torch.optim.SGD
        assert [each.interval for each in t.lr_scheduler_configs] == []
        assert module.run.trainer is t

    callbacks = [logger, saves, early] = [CSVLogger(), ModelCheckpoint(), EarlyStopping("val/dataloader_idx_0")]
    module, data = Net(ask, "on_train_start"), Data()
    fit(tmp_path, callbacks=callbacks).run(module, datamodule=data)
    assert len(module.asked["on_train_start"]) == 1
    for owner in (module, data):
        with pytest.raises(AttributeError, match=r"\.trainer is there during a Fit run only"):
            _ = owner.trainer
    assert copy.deepcopy(data).__dict__.keys() == data.__dict__.keys() - {"_attached_run"}


def test_a_checkpoint_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Saves(Weight):
        def on_train_epoch_end(self) -> None:
            where = self.trainer.save_checkpoint(tmp_path / "elsewhere" / "mine")
            assert where == tmp_path / "elsewhere" / "mine"
            assert self.trainer.save_checkpoint("named") == self.run.checkpoint_path("named")
            with pytest.raises(ValueError, match="checkpoints are complete"):
                self.trainer.save_checkpoint("x", weights_only=True)
            self.trainer.print("said")

        def on_train_start(self) -> None:
            self.from_ = self.trainer.ckpt_path

    module = Saves()
    fit(tmp_path / "run").run(module, ones(3))
    assert module.from_ is None
    assert capsys.readouterr().out == "said\n"
    assert Weight.load_from_checkpoint(tmp_path / "elsewhere" / "mine").w.item() == -3.0
    again = Saves()
    other = fit(tmp_path / "other", max_epochs=2)
    (tmp_path / "elsewhere" / "mine").rename(tmp_path / "moved")
    assert other.run(again, ones(3), resume=Resume(tmp_path / "moved")).step == 6
    assert (again.from_, again.w.item()) == (str(tmp_path / "moved"), -6.0)


def test_other_names_have_an_answer(tmp_path: Path) -> None:
    def ask(t: Any) -> None:
        with pytest.raises(AttributeError, match=r"no attribute 'barebones': there is nothing to switch off"):
            _ = t.barebones
        with pytest.raises(AttributeError, match=r"trainer.max_time cannot be set.*settings.max_time"):
            t.max_time = 3
        with pytest.raises(
            AttributeError, match=r"log_every_n_steps cannot be set: give Trainer\(log_every_n_steps=\.\.\.\)"
        ):
            t.log_every_n_steps = 3
        with pytest.raises(AttributeError, match=r"trainer.global_step cannot be set: it follows from the run"):
            t.global_step = 3
        with pytest.raises(AttributeError, match=r"no attribute 'anything': self.run is the run"):
            _ = t.anything
        with pytest.raises(AttributeError, match=r"'StrategyView' object has no attribute 'launcher'"):
            _ = t.strategy.launcher
        with pytest.raises(AttributeError):
            t.world_size = 3
        t.mine = 1
        assert t.mine == 1

    answers(tmp_path, ask)


class Told(Callback):
    def __init__(self) -> None:
        self.view: Any = None

    def on_train_start(self, run: Any, module: Any) -> None:
        self.view = run.trainer


def two_ranks(folder: str) -> list[Any]:
    """On each rank: steps, lengths, a pass over the loader in the middle of an epoch, values, a broadcast."""

    class Net(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.found = torch.nn.Parameter(torch.zeros(1)), []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", batch.mean(), on_step=True, on_epoch=True)
            if batch_idx == 1:
                loader = self.trainer.train_dataloader
                self.found += [len(loader), loader.batch_size, sorted(b.item() for b in loader)]
                self.found.append(self.trainer.callback_metrics["x_step"].item())
            return (self.w * batch).mean()

        def on_train_epoch_end(self) -> None:
            self.found.append(self.trainer.callback_metrics["x_epoch"].item())
            self.found.append(self.trainer.strategy.broadcast({"rank": self.global_rank}, src=1))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", batch.mean())

        def on_validation_epoch_end(self) -> None:
            if self.trainer.is_global_zero:  # no other rank takes part
                self.found.append(self.trainer.callback_metrics["v"].item())

        def configure_optimizers(self) -> Any:
            self.found.append(self.trainer.estimated_stepping_batches)
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module, data = Net(), DataLoader(torch.arange(1.0, 8.0)[:, None], batch_size=1)
    Fit(
        strategy="ddp",
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=3,
        root_dir=folder,
    ).run(module, data, DataLoader(torch.arange(4.0)[:, None], batch_size=1))
    return module.found


def test_on_two_ranks(tmp_path: Path) -> None:
    first, second = ranks_of(two_ranks, 2, tmp_path)
    # 7 samples: 4 batches a rank, 2 windows; a rank's own samples, and its step's mean of the first two of them.
    assert first[0] == second[0] == 2
    assert first[1:3] == second[1:3] == [4, 1]
    assert sorted({*first[3], *second[3]}) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert {first[4], second[4]} == {2.0, 3.0}
    assert first[5] == 1.5
    assert first[6:] == second[5:] == [4.0, {"rank": 1}]
