"""``Trainer`` against Lightning's: the same weights, events, counters, metrics and results."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, watcher, weights
from torch.utils.data import DataLoader

from engine import Fit
from engine.compat.lightning import loop_view, trainer_parts, trainer_view

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "every 3 batches": {"val_check_interval": 3},
    "every 7 batches over epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "a quarter": {"val_check_interval": 0.25},
    "a third of every second epoch": {"val_check_interval": 0.3, "check_val_every_n_epoch": 2, "max_epochs": 4},
    "every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "accumulated, every 4 batches": {"accumulate_grad_batches": 2, "val_check_interval": 4},
    "limited": {"limit_train_batches": 3, "limit_val_batches": 2},
    "limited in part": {"limit_train_batches": 0.5, "limit_val_batches": 0.25},
    "steps": {"max_steps": 13, "max_epochs": None},
    "steps, epochs without end": {"max_steps": 13, "max_epochs": -1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "whole sanity check": {"num_sanity_val_steps": -1},
    "overfitting": {"overfit_batches": 3},
    "once": {"fast_dev_run": True},
    "half precision": {"precision": "bf16-mixed"},
}
MANUAL = ("plain", "every 3 batches", "every 7 batches over epochs", "a quarter", "every second epoch", "steps")


@pytest.mark.parametrize(("name", "automatic"), [*((name, True) for name in RUNS), *((name, False) for name in MANUAL)])
def test_a_training_is_lightnings(name: str, automatic: bool, tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        net, watch = module(library, automatic), watcher(library)
        fitted = trainer(library, tmp_path, callbacks=[watch], **{"max_epochs": 2, **RUNS[name]})
        quietly(fitted.fit, net, data(), data())
        found.append((net, watch, fitted))
    (theirs, seen, fitted), (mine, mine_seen, mine_fitted) = found
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)
    assert mine.seen == theirs.seen
    assert mine_seen.seen == seen.seen
    assert (mine_fitted.current_epoch, mine_fitted.global_step) == (fitted.current_epoch, fitted.global_step)
    metrics = {key: value.item() for key, value in fitted.callback_metrics.items()}
    mine_metrics = {key: value.item() for key, value in mine_fitted.callback_metrics.items()}
    if "accumulated" in name:  # the last micro-batch there, here the mean of the step's
        del metrics["loss_step"], mine_metrics["loss_step"]
    assert mine_metrics == pytest.approx(metrics, abs=1e-5)
    assert set(mine_fitted.logged_metrics) == set(fitted.logged_metrics)
    assert mine_fitted.state.finished
    assert not mine_fitted.training


def with_outputs(library: Any, returns: str, automatic: bool) -> tuple[Any, Any]:
    """A module whose ``training_step`` returns this, and a callback; both keep the ``outputs`` of each batch in ``outputs``."""
    base = type(module(library, automatic))

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = base.training_step(self, batch, batch_idx)
        return {"tensor": loss, "dict": {"loss": loss, "more": batch_idx}, "nothing": None}[returns]

    def keep(self: Any, *args: Any) -> None:
        outputs = args[-3]
        self.outputs.append({key: float(value) for key, value in outputs.items()})
        assert not getattr(outputs.get("loss"), "requires_grad", False)

    net = type("Net", (base,), {"training_step": training_step, "on_train_batch_end": keep})()
    watch = type("Watch", (library.Callback,), {"on_train_batch_end": keep})()
    net.outputs, watch.outputs = [], []
    net.load_state_dict(module(library).state_dict())
    return net, watch


@pytest.mark.parametrize("plain_fit", [False, True])
@pytest.mark.parametrize(
    ("returns", "automatic", "window"),
    [("tensor", True, 1), ("tensor", True, 2), ("dict", True, 2), ("dict", False, 1), ("nothing", False, 1)],
)
def test_outputs_are_lightnings(returns: str, automatic: bool, window: int, plain_fit: bool, tmp_path: Path) -> None:
    theirs, seen = with_outputs(THEIRS, returns, automatic)
    options = {"max_epochs": 1, "accumulate_grad_batches": window}
    quietly(trainer(THEIRS, tmp_path, callbacks=[seen], **options).fit, theirs, data(20))
    mine, mine_seen = with_outputs(OURS, returns, automatic)
    if plain_fit:
        Fit(accelerator="cpu", callbacks=[mine_seen], root_dir=tmp_path, **options).run(mine, data(20))
    else:
        trainer(OURS, tmp_path, callbacks=[mine_seen], **options).fit(mine, data(20))
    assert len(seen.outputs) == 5
    for other, own in zip(seen.outputs, mine_seen.outputs, strict=True):
        assert own == pytest.approx(other)
    assert theirs.outputs == seen.outputs
    assert mine.outputs == mine_seen.outputs


def watcher_of_validations(library: Any) -> Any:
    """A callback that remembers the step and the value of each validation."""

    def on_validation_end(self: Any, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append((trainer.global_step, round(trainer.callback_metrics["val"].item(), 5)))

    made = type("Validations", (library.Callback,), {"on_validation_end": on_validation_end})()
    made.seen = []
    return made


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"accumulate_grad_batches": 4, "val_check_interval": 0.5}, [1, 3, 4, 6]),  # after 6 and 12 batches of 12
        ({"accumulate_grad_batches": 2, "val_check_interval": 3}, [1, 3, 4, 6, 7, 9, 10, 12]),
        ({"accumulate_grad_batches": 4, "val_check_interval": 7, "check_val_every_n_epoch": None}, [1, 3, 5]),
    ],
)
def test_a_validation_within_an_optimizer_steps_batches_sees_lightnings_weights(
    options: Any, steps: list[int], tmp_path: Path
) -> None:
    found = []
    for library in (THEIRS, OURS):
        watch = watcher_of_validations(library)
        quietly(
            trainer(library, tmp_path, callbacks=[watch], max_epochs=2, **options).fit,
            module(library),
            data(48),
            data(),
        )
        found.append(dict(watch.seen))  # Lightning validates the same weights twice where two fall into one step
    theirs, mine = found
    assert mine == theirs
    assert list(mine) == steps


def test_evaluations_return_what_lightnings_do(tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        net, own = module(library), trainer(library, tmp_path)
        tests = quietly(own.test, net, [data(), data(20)])
        found.append((net.seen, [*quietly(own.validate, net, data()), *tests], quietly(own.predict, net, data())))
    (theirs, metrics, predictions), (mine, mine_metrics, mine_predictions) = found
    assert mine == theirs
    assert len(mine_metrics) == 3
    for own, other in zip(mine_metrics, metrics, strict=True):
        assert own == pytest.approx(other)
    torch.testing.assert_close(mine_predictions, predictions)


def test_predictions_may_be_left_out(tmp_path: Path) -> None:
    assert trainer(OURS, tmp_path).predict(module(OURS), data(), return_predictions=False) is None


def test_the_constructor_has_lightnings_arguments() -> None:
    theirs = inspect.signature(lightning.Trainer.__init__).parameters
    mine = inspect.signature(OURS.Trainer.__init__).parameters
    assert {name: each.default for name, each in mine.items()} == {name: each.default for name, each in theirs.items()}


def test_each_rank_of_several_needs_loaders_that_say_that_they_are_divided(tmp_path: Path) -> None:
    one = trainer(OURS, tmp_path, max_epochs=1, use_distributed_sampler=False)
    one.fit(module(OURS), data())  # there is nothing to divide
    assert one.global_step == 10
    run = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"use_distributed_sampler=False.* on 2 ranks.*presharded = True"):
        one.attach_run(run)


@pytest.mark.parametrize(
    ("given", "counterpart"),
    [
        ({"plugins": ["x"]}, "precision"),
        ({"enable_autolog_hparams": False}, "logger"),
        ({"model_registry": "x"}, "on_save_checkpoint"),
        ({"strategy": "xla"}, "possible: ddp"),
        ({"profiler": "advanced"}, "simple"),
        ({"check_val_every_n_epoch": None}, "an int"),
        ({"val_check_interval": "00:00:01:00", "check_val_every_n_epoch": 2}, "without epochs"),
        ({"barebones": True, "enable_progress_bar": True}, "leave one out"),
    ],
)
def test_an_argument_without_a_counterpart_is_an_error(given: dict[str, Any], counterpart: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=counterpart):
        OURS.Trainer(default_root_dir=tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"val_check_interval": 11}, "check_val_every_n_epoch=None"),
    ],
)
def test_a_validation_that_cannot_come_where_it_is_asked_for(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(OURS, tmp_path, **given).fit(module(OURS), data(), data())


def test_defaults_are_lightnings(tmp_path: Path) -> None:
    fitted = OURS.Trainer(default_root_dir=tmp_path, accelerator="cpu")
    assert fitted.max_epochs is None
    assert [type(each).__name__ for each in fitted.callbacks] == ["RichProgressBar", "ModelSummary", "ModelCheckpoint"]
    assert type(fitted.logger).__name__ == "TensorBoardLogger"
    assert (fitted.current_epoch, fitted.global_step, fitted.callback_metrics, fitted.is_global_zero) == (
        0,
        0,
        {},
        True,
    )
    assert fitted.state.status == "initializing"
    assert (fitted.num_sanity_val_steps, fitted.log_every_n_steps, fitted.check_val_every_n_epoch) == (2, 50, 1)
    assert OURS.Trainer(max_epochs=-1, accelerator="cpu").max_epochs == -1


def test_the_best_checkpoint_is_found(tmp_path: Path) -> None:
    net, saves = (
        module(OURS),
        OURS.callbacks.ModelCheckpoint(monitor="val", save_top_k=2, filename="{epoch:02d}-{val:.2f}"),
    )
    stops = OURS.callbacks.EarlyStopping("val", patience=1, min_delta=10.0)
    fitted = trainer(OURS, tmp_path, callbacks=[saves, stops], enable_checkpointing=True, max_epochs=5)
    fitted.fit(net, data(), data())
    assert fitted.current_epoch == 2  # the second epoch is not 10 better
    assert fitted.checkpoint_callback is saves
    assert fitted.early_stopping_callback is stops
    best = Path(saves.best_model_path)
    assert best.parent == tmp_path / "checkpoints"
    assert best.name == f"epoch=01-val={saves.best_model_score:.2f}.ckpt"
    assert len(saves.best_k_models) == 2
    assert saves.last_model_path == ""
    expected = fitted.validate(net, data())
    assert fitted.validate(dataloaders=data()) == fitted.validate(net, data(), ckpt_path="best") == expected
    assert fitted.validate(module(OURS), data(), ckpt_path=saves.best_model_path) == expected


def test_loaders_of_a_data_module(tmp_path: Path) -> None:
    class Data(OURS.LightningDataModule):  # type: ignore[misc]
        def prepare_data(self) -> None:
            assert self.trainer.world_size == 1

        def setup(self, stage: str) -> None:
            self.stages = [*getattr(self, "stages", ()), stage, self.trainer.training]

        def train_dataloader(self) -> DataLoader[Any]:
            return data()

        test_dataloader = train_dataloader

    fitted, own, net = trainer(OURS, tmp_path, max_epochs=1), Data(), module(OURS)
    fitted.fit(net, own)
    fitted.test(net, datamodule=own)
    assert own.stages == ["fit", True, "test", False]
    assert fitted.datamodule is own
    assert net.trainer is fitted
    assert fitted.model is net


def test_a_module_in_a_module_logs(tmp_path: Path) -> None:
    class Inner(OURS.LightningModule):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            self.log("inner", x.sum())
            assert self.trainer.current_epoch == 0
            return x

    net = module(OURS)
    net.inner = Inner()
    net.layers.append(net.inner)
    fitted = trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(net, data())
    assert "inner" in fitted.callback_metrics


def test_a_stop_is_asked_for_by_the_module(tmp_path: Path) -> None:
    net = module(OURS)
    fitted = trainer(OURS, tmp_path, max_epochs=5)
    type(net).on_train_epoch_end = lambda self: setattr(self.trainer, "should_stop", True)
    fitted.fit(net, data())
    assert fitted.current_epoch == 1


def test_a_schedule_over_all_steps(tmp_path: Path) -> None:
    net, steps = module(OURS), []
    make = net.configure_optimizers
    net.configure_optimizers = lambda: (steps.append(net.trainer.estimated_stepping_batches), make())[1]
    type(net).configure_optimizers = lambda self: vars(self)["configure_optimizers"]()
    fitted = trainer(OURS, tmp_path, max_epochs=3, accumulate_grad_batches=4)
    fitted.fit(net, data())
    assert steps == [9]
    assert fitted.estimated_stepping_batches == 9  # also afterwards


@pytest.mark.parametrize("library", [THEIRS, OURS])
def test_callbacks_get_the_stage_as_a_member_of_lightnings_enum(library: Any, tmp_path: Path) -> None:
    seen = []

    class Tells(library.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: Any, stage: Any) -> None:
            seen.append((stage.value, trainer.state.fn.value))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.state.stage.name, trainer.state.status.name))

    fitted = quietly(trainer, library, tmp_path, max_steps=1, callbacks=[Tells()])
    assert (fitted.state.fn, fitted.state.stage) == (None, None)
    quietly(fitted.fit, module(library), data())
    assert seen == [("fit", "fit"), ("TRAINING", "RUNNING")]


_AFTER = ("should_stop", "is_last_batch", "num_training_batches", "current_epoch", "global_step", "interrupted")


@pytest.mark.parametrize("end", ["max_epochs", "max_steps", "stopped", "early", "failed", "validated"])
def test_a_trainer_after_a_training_says_what_lightnings_does(end: str, tmp_path: Path) -> None:
    seen = []
    for library in (THEIRS, OURS):
        net = module(library)

        def ends(net: Any = net) -> None:
            if net.global_step == 3 and end == "stopped":
                net.trainer.should_stop = True
            if net.global_step == 3 and end == "failed":
                raise KeyError("batch")

        net.on_after_backward = ends
        early = [library.callbacks.EarlyStopping("val", patience=1, min_delta=100.0)] if end == "early" else []
        limit = {"max_steps": 3} if end == "max_steps" else {"max_epochs": 9 if end == "early" else 2}
        fitted = trainer(library, tmp_path, callbacks=early, **limit)
        try:
            quietly(fitted.fit, net, data(), data())
        except KeyError:
            assert end == "failed"
        if end == "validated":
            quietly(fitted.validate, net, data(8), verbose=False)
        seen.append({name: getattr(fitted, name) for name in _AFTER})
    assert seen[1] == seen[0]


# -- the life of a trainer ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_loaders_are_asked_for_after_on_fit_start(resumed: bool, tmp_path: Path) -> None:
    base = type(module(OURS))

    class Late(base):  # type: ignore[misc, valid-type]
        rows = 0

        def on_fit_start(self) -> None:
            self.rows = 20

        def train_dataloader(self) -> Any:
            return data(self.rows)

        def val_dataloader(self) -> Any:
            return data(self.rows)

    net, fitted = Late(), trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(net)
    assert (fitted.global_step, net.seen.count("on_validation_batch_start")) == (5, 2 + 5)
    if resumed:
        fitted.save_checkpoint(tmp_path / "x.ckpt")
        again = trainer(OURS, tmp_path, max_epochs=3)
        again.fit(Late(), ckpt_path=tmp_path / "x.ckpt")
        assert (again.global_step, again.current_epoch) == (15, 3)


@pytest.mark.parametrize("library", [THEIRS, OURS])
def test_a_validation_may_have_gradients(library: Any, tmp_path: Path) -> None:
    base = type(module(library))

    class WithGradients(base):  # type: ignore[misc, valid-type]
        def on_validation_model_eval(self) -> None:
            super().on_validation_model_eval()
            torch.set_grad_enabled(True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("slope", torch.autograd.grad(self.loss(batch), self.layers[0].bias)[0].abs().sum())

    fitted = trainer(library, tmp_path, inference_mode=False)
    [metrics] = quietly(fitted.validate, WithGradients(), data())
    assert metrics["slope"] > 0
    assert torch.is_grad_enabled()


def test_devices_and_precision_before_a_run(tmp_path: Path) -> None:
    for library in (THEIRS, OURS):
        fitted = quietly(trainer, library, tmp_path, precision="bf16-mixed", devices=2)
        assert (fitted.num_devices, fitted.num_nodes, fitted.precision) == (2, 1, "bf16-mixed")
        assert fitted.device_ids == [0, 1]
        strategy = fitted.strategy
        assert (strategy.root_device, strategy.is_global_zero, strategy.local_rank) == (torch.device("cpu"), True, 0)


def test_what_only_a_run_knows_says_so_before_it(tmp_path: Path) -> None:
    fitted = trainer(OURS, tmp_path)
    with pytest.raises(AttributeError, match=r"no run has started: \w+ is not known yet"):
        _ = fitted.estimated_stepping_batches
    assert fitted.strategy.reduce_boolean_decision(True)  # one process is alone, and needs no run for it


@pytest.mark.parametrize(
    ("part", "path"), [(trainer_view, "_run"), (loop_view, "_run"), (trainer_parts.StrategyView, "_engine")]
)
def test_before_a_run_there_is_what_a_view_reads_or_an_error_that_says_so(part: Any, path: str, tmp_path: Path) -> None:
    reads = set(re.findall(rf"self\.{path}\.((?:\w+\.)*\w+)", inspect.getsource(part)))
    assert len(reads) >= 5
    before = trainer(OURS, tmp_path).run
    for read in reads:
        value = before.engine if path == "_engine" else before
        for name in read.split("."):
            try:
                value = getattr(value, name)
            except AttributeError as error:
                assert str(error) == f"no run has started: {name} is not known yet", read  # noqa: PT017
                break


def test_a_second_training_counts_on(tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        net, fitted, steps = module(library), trainer(library, tmp_path, max_epochs=2), []
        for _ in range(2):
            quietly(fitted.fit, net, data())
            steps.append((fitted.current_epoch, fitted.global_step))
        fitted.fit_loop.max_epochs = 3
        quietly(fitted.fit, net, data())
        fitted.fit_loop.epoch_loop.max_steps = fitted.global_step + 4
        fitted.fit_loop.max_epochs = -1
        quietly(fitted.fit, net, data())
        found.append([*steps, (fitted.max_epochs, fitted.max_steps, fitted.global_step)])
    assert found[1] == found[0] == [(2, 20), (2, 20), (-1, 34, 34)]


def test_a_limit_set_in_a_training_ends_it(tmp_path: Path) -> None:
    def shorten(trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.fit_loop.max_steps = 7

    fitted = trainer(
        OURS, tmp_path, max_epochs=2, callbacks=[OURS.callbacks.LambdaCallback(on_train_batch_end=shorten)]
    )
    fitted.fit(module(OURS), data())
    assert fitted.global_step == 7


def test_optimizers_of_the_strategy_say_what_to_use(tmp_path: Path) -> None:
    fitted = trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(module(OURS), data())
    with pytest.raises(AttributeError, match=r"setup_optimizers.*add_param_group"):
        fitted.strategy.setup_optimizers(fitted)


def test_loggers_after_a_training(tmp_path: Path) -> None:
    for name in ("CSVLogger", "TensorBoardLogger"):
        for number in range(2):
            logger = getattr(OURS.loggers, name)(tmp_path / name)
            fitted = trainer(OURS, tmp_path, max_epochs=1, logger=logger)
            fitted.fit(module(OURS), data())
            assert (logger.version, str(logger.save_dir)) == (number, str(tmp_path / name))
            assert logger.experiment is not None
            logger.log_metrics({"after": 1.0}, 11)
    assert trainer(OURS, tmp_path, logger=OURS.loggers.CSVLogger("x", version="mine")).logger.version == "mine"


@pytest.mark.parametrize("missing", ["configure_optimizers", "training_step"])
def test_a_training_without_optimizer_or_loss_ends_at_max_steps(missing: str, tmp_path: Path) -> None:
    ends = []
    for library in (THEIRS, OURS):
        net = module(library, True)
        setattr(net, missing, lambda *args: None)
        fitted = trainer(library, tmp_path, max_steps=6, max_epochs=-1)
        before = weights(net).clone()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fitted.fit(net, data())
        assert any(missing in str(warning.message) and "returned" in str(warning.message) for warning in told)
        assert torch.equal(weights(net), before)
        ends.append((fitted.global_step, fitted.current_epoch, fitted.state.finished))
    assert ends[0] == ends[1] == (6, 1, True)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_an_interval_longer_than_an_epoch_does_not_matter_without_validation(limit: float, tmp_path: Path) -> None:
    steps = []
    for library in (THEIRS, OURS):
        made = trainer(library, tmp_path, max_epochs=1, limit_val_batches=limit, val_check_interval=100)
        quietly(made.fit, module(library), data(8), data())
        steps.append(made.global_step)
    assert steps[0] == steps[1] > 0
