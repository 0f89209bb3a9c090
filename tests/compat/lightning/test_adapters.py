"""``Fit`` with modules, data modules and callbacks of the installed Lightning."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, watcher, weights
from lightning.pytorch.trainer.states import TrainerFn

from engine import Callback, Fit, Run, TrainModule
from engine.config.hyperparameters import for_loggers


@pytest.mark.parametrize("automatic", [True, False])
def test_fit_trains_lightnings_module(automatic: bool, tmp_path: Path) -> None:
    expected, seen = module(THEIRS, automatic), watcher(THEIRS)
    quietly(trainer(THEIRS, tmp_path, max_epochs=2, callbacks=[seen]).fit, expected, data(), data())
    net, watch = module(THEIRS, automatic), watcher(THEIRS)
    fit = Fit(max_epochs=2, accelerator="cpu", callbacks=[watch], root_dir=tmp_path)
    result = fit.run(net, data(), data())
    torch.testing.assert_close(weights(net), weights(expected), rtol=0, atol=1e-6)
    assert net.seen == expected.seen
    assert watch.seen == seen.seen
    assert result.step == 20
    assert list(fit.state_dict(net)) == list(expected.state_dict())
    assert "log" not in vars(net)
    quietly(trainer(THEIRS, tmp_path, max_epochs=1).fit, net, data(), data())  # Lightning trains it again


def test_a_trainer_takes_them_too(tmp_path: Path) -> None:
    net, watch = module(THEIRS), watcher(THEIRS)
    stops = THEIRS.callbacks.EarlyStopping("val", patience=1, min_delta=10.0)
    fitted = trainer(OURS, tmp_path, max_epochs=5, callbacks=[watch, stops])
    fitted.fit(net, data(), data())
    assert fitted.current_epoch == 2
    assert stops.stopped_epoch == 1
    assert fitted.model is net
    assert watch.seen[-1] == ("on_fit_end", 2, 20)
    assert len(fitted.predict(net, data())) == 10


def test_a_state_of_a_callback_is_resumed(tmp_path: Path) -> None:
    class Counts(THEIRS.Callback):  # type: ignore[misc]
        steps = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    path = tmp_path / "x.ckpt"
    first = trainer(OURS, tmp_path, max_epochs=1, callbacks=[Counts()])
    first.fit(module(OURS), data())
    first.save_checkpoint(path)
    counts = Counts()
    trainer(OURS, tmp_path, max_epochs=2, callbacks=[counts]).fit(module(OURS), data(), ckpt_path=path)
    assert counts.steps == 20


def noting(kind: type, names: tuple[str, ...]) -> Any:
    """A module of a subclass of ``kind`` that overrides the methods of these names; each notes its name and calls that of the base class."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(name)
            return getattr(super(Noting, self), name)(*args, **kwargs)

        return method

    Noting: Any = type("Noting", (kind,), {name: override(name) for name in names})
    torch.manual_seed(7)
    return Noting()


class Automatic(type(module(THEIRS))):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"x": 1.0, "y": self.all_gather(torch.ones(()))})
        self.print("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class ByHand(type(module(THEIRS, False))):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with self.toggled_optimizer(optimizer):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
        self.lr_schedulers().step()


_ASKS = {
    Automatic: (
        *(
            "training_step",
            "log",
            "log_dict",
            "print",
            "all_gather",
            "backward",
            "optimizer_step",
            "optimizer_zero_grad",
        ),
        *("configure_gradient_clipping", "clip_gradients", "lr_scheduler_step"),
    ),
    ByHand: (
        "optimizers",
        "toggle_optimizer",
        "untoggle_optimizer",
        "manual_backward",
        "clip_gradients",
        "lr_schedulers",
    ),
}


@pytest.mark.parametrize("kind", _ASKS)
def test_a_users_overrides_are_called_and_reach_the_run_with_super(kind: Any, tmp_path: Path) -> None:
    clips = {"gradient_clip_val": 0.1} if kind is Automatic else {}
    expected, net = noting(kind, _ASKS[kind]), noting(kind, _ASKS[kind])
    quietly(trainer(THEIRS, tmp_path, max_epochs=1, **clips).fit, expected, data())
    result = Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path, **clips).run(net, data())
    assert net.seen == expected.seen
    assert set(_ASKS[kind]) <= set(net.seen)
    torch.testing.assert_close(weights(net), weights(expected), rtol=0, atol=1e-6)
    assert kind is ByHand or result.metrics["y"] == 1.0


def test_methods_set_on_an_object_are_called(tmp_path: Path) -> None:
    seen = {}
    for library in (THEIRS, OURS):
        net = module(THEIRS)
        net.seen, step = [], net.training_step
        net.training_step = lambda batch, batch_idx, net=net, step=step: (
            net.seen.append("step") or step(batch, batch_idx)
        )
        net.on_train_start = functools.partial(net.seen.append, "start")
        net.on_fit_start = None
        quietly(trainer(library, tmp_path, max_epochs=1).fit, net, data(8))
        net.on_train_end = functools.partial(net.seen.append, "end")
        quietly(trainer(library, tmp_path, max_epochs=1).fit, net, data(8))
        seen[library.__name__ if library is OURS else "theirs"] = net.seen
    [theirs, ours] = seen.values()
    assert ours == theirs
    assert ours.count("step") == 4


def test_hyperparameters_are_those_of_the_moment(tmp_path: Path) -> None:
    class Quiet(THEIRS.LightningModule):  # type: ignore[misc]
        def __init__(self, secret: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    net, quiet = module(THEIRS), Quiet()
    assert OURS.adapt(net).hparams["lr"] == 0.05
    net.hparams.lr = 0.1
    adapted = OURS.adapt(net)
    assert adapted.hparams["lr"] == 0.1
    assert for_loggers(adapted) == {"width": 5, "lr": 0.1}
    assert for_loggers(OURS.adapt(quiet)) == {}


class Plain(THEIRS.LightningModule):  # type: ignore[misc]
    """Has names of ours as its own: an attribute and two submodules."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self._context, self._toggled = torch.nn.Linear(3, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self._adapted, self.fails = "words", fails

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails:
            raise KeyError("step")
        self.log("a", 1.0)
        return self._context(self._toggled(self.layer(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_copied_and_pickled_after_a_run_as_before(fails: bool, tmp_path: Path) -> None:
    net, pickles = Plain(fails), []

    class Pickles(Callback):
        def on_train_start(self, run: Run, module: TrainModule) -> None:
            pickles.append(pickle.dumps(net))

    fit, file = Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path, callbacks=Pickles()), io.BytesIO()
    if fails:
        with pytest.raises(KeyError, match="step"):
            fit.run(net, data())
    else:
        fit.run(net, data())
    torch.save(net, file)
    file.seek(0)
    copies = [pickle.loads(text) for text in (*pickles, pickle.dumps(net))]
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False), *copies):
        assert type(other) is Plain
        assert (other._adapted, type(other._context), list(other.state_dict())) == (
            "words",
            torch.nn.Linear,
            list(net.state_dict()),
        )
        before, other.fails = weights(other), False
        assert fit.run(other, data()).step == 10
        assert not torch.equal(weights(other), before)
    adapted = copy.deepcopy(OURS.adapt(net))
    assert adapted.original is not net
    assert adapted.global_step == (0 if fails else 10)


def test_a_run_within_a_run_of_the_same_module_is_an_error(tmp_path: Path) -> None:
    class Nests(THEIRS.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(pl_module, data())

    with pytest.raises(RuntimeError, match=r"Plain is in a run.*copy\.deepcopy"):
        Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path, callbacks=Nests()).run(Plain(), data())


@pytest.mark.parametrize("library", [OURS, THEIRS])
def test_setup_and_teardown_get_lightnings_stage(library: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Net(type(module(library))):  # type: ignore[misc]
        def setup(self, stage: Any) -> None:
            seen.append(stage)

        teardown = setup

    class Data(library.LightningDataModule):  # type: ignore[misc]
        def setup(self, stage: Any) -> None:
            seen.append(stage)

        def teardown(self, stage: Any = None) -> None:
            seen.append(stage)

        def train_dataloader(self) -> Any:
            return data()

    Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(Net(), datamodule=Data())
    assert [stage.value for stage in seen] == ["fit"] * 4
    assert all(stage == TrainerFn.FITTING for stage in seen)


def test_hooks_that_are_never_called_are_errors_or_named(tmp_path: Path) -> None:
    class Old(type(module(THEIRS))):  # type: ignore[misc]
        def training_epoch_end(self, outputs: Any) -> None: ...

    class Misspelled(THEIRS.Callback):  # type: ignore[misc]
        def on_train_batchend(self, *args: Any) -> None: ...

    with pytest.raises(
        TypeError, match="Old defines training_epoch_end, which is not called: define on_train_epoch_end"
    ):
        Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(Old(), data())
    with pytest.warns(
        UserWarning, match=r"Misspelled\.on_train_batchend is never called: the hook is on_train_batch_end"
    ):
        Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path, callbacks=Misspelled()).run(module(THEIRS), data())


def test_a_module_without_optimizers_is_an_error(tmp_path: Path) -> None:
    class Trains(THEIRS.LightningModule):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    with pytest.raises(TypeError, match="Trains must define configure_optimizers"):
        Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(Trains(), data())


def test_what_is_not_honoured_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = type(module(THEIRS))
    other = type(
        "Other", (kind,), {"configure_sharded_model": lambda self: None, "on_save_checkpoint": lambda self, c: None}
    )
    OURS.adapt(other())
    assert "Other.configure_sharded_model is not called" in caplog.text
    assert "without weights and counters" in caplog.text


def test_a_data_module(tmp_path: Path) -> None:
    class Data(THEIRS.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return data()

    net = module(THEIRS)
    assert Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(net, datamodule=Data()).step == 10


class Classes(THEIRS.LightningDataModule):  # type: ignore[misc]
    """Knows its number of classes after ``setup``, where it assigns its loader; keeps its trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare_data_per_node, self.trainers = False, []

    def setup(self, stage: str) -> None:
        self.num_classes = 7
        self.trainers.append(self.trainer)
        self.train_dataloader = data


@pytest.mark.parametrize("plain_fit", [False, True])
def test_a_data_module_stays_the_users_object(plain_fit: bool, tmp_path: Path) -> None:
    kind, seen = type(module(THEIRS)), []

    class Reads(kind):  # type: ignore[misc, valid-type]
        def on_fit_start(self) -> None:
            seen.append((self.trainer, self.trainer.datamodule, self.trainer.datamodule.num_classes))

    net, classes = Reads(), Classes()
    if plain_fit:
        Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path).run(net, datamodule=classes)
    else:
        fitted = trainer(OURS, tmp_path, max_epochs=1)
        fitted.fit(net, datamodule=classes)
        assert fitted.datamodule is classes
    [(of_module, shown, number)] = seen
    assert (shown, number) == (classes, 7)
    assert classes.trainers == [of_module]
    assert of_module.lightning_module is net
    adapted = OURS.adapt(classes)
    assert (adapted.num_classes, adapted.prepare_data_per_node, adapted.val_dataloader()) == (7, False, None)


def test_a_data_module_from_datasets(tmp_path: Path) -> None:
    made = THEIRS.LightningDataModule.from_datasets(data().dataset, data().dataset, batch_size=4)
    net, fitted = module(THEIRS), trainer(OURS, tmp_path, max_epochs=1)
    quietly(fitted.fit, net, datamodule=made)  # its loaders pin memory
    assert fitted.global_step == 10
    assert "on_validation_batch_start" in net.seen


@pytest.mark.parametrize("plain_fit", [False, True])
def test_callbacks_stay_the_users_objects(plain_fit: bool, tmp_path: Path) -> None:
    seen = []

    class Reads(THEIRS.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.extend([trainer.early_stopping_callback, trainer.checkpoint_callback, trainer.callbacks])

    stops = THEIRS.callbacks.EarlyStopping("val")
    saves = THEIRS.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val", save_top_k=1)
    given = [saves, Reads(), stops]
    if plain_fit:
        fit = Fit(max_epochs=3, accelerator="cpu", callbacks=given, root_dir=tmp_path)
        fit.run(module(OURS), data(), data())
    else:
        fitted = trainer(OURS, tmp_path, max_epochs=3, callbacks=given, enable_checkpointing=True)
        fitted.fit(module(OURS), data(), data())
        assert (fitted.early_stopping_callback, fitted.checkpoint_callbacks) == (stops, [saves])
    assert seen[:2] == [stops, saves]
    assert set(given) == set(seen[2])
    assert [path.name for path in (tmp_path / "best").iterdir()] == [Path(saves.best_model_path).name]


def test_an_attribute_of_the_users_own_name_is_no_adapter(tmp_path: Path) -> None:
    """Adapters are known by their class: a module with an attribute ``foreign`` is itself."""
    seen = []

    class Reads(THEIRS.Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            seen.extend([pl_module, trainer.model])

    net = module(OURS)
    net.foreign = net.original = "words of another language"
    trainer(OURS, tmp_path, max_epochs=1, callbacks=[Reads()]).fit(net, data())
    assert seen == [net, net]


@pytest.mark.parametrize("library", [OURS, THEIRS])
def test_modules_in_a_list_log(library: Any, tmp_path: Path) -> None:
    class Head(library.LightningModule):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            self.log("mean", x.mean())
            return x

    net = module(library)
    net.heads = torch.nn.ModuleList([Head()])
    net.layers.append(net.heads[0])
    fitted = trainer(OURS, tmp_path, max_epochs=1)
    fitted.fit(net, data())
    assert "mean" in fitted.callback_metrics
    assert net.heads[0].trainer is fitted


def test_other_objects_are_errors(tmp_path: Path) -> None:
    fit = Fit(max_epochs=1, accelerator="cpu", root_dir=tmp_path)
    with pytest.raises(TypeError, match="Fit takes a TrainModule, got Linear"):
        fit.run(torch.nn.Linear(1, 1), data())
    with pytest.raises(TypeError, match="takes a LightningModule, got Linear"):
        trainer(OURS, tmp_path).fit(torch.nn.Linear(1, 1), data())
    with pytest.raises(TypeError, match=r"give engine\.Callback objects"):
        Fit(callbacks=[object()], accelerator="cpu", root_dir=tmp_path).run(module(OURS), data())
