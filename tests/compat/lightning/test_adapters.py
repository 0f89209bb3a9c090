"""``Fit`` with modules, data modules and callbacks of the installed Lightning."""

from __future__ import annotations

from configparser import ConfigParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, watcher, weights

from engine import Fit
from engine.utils import extensions


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of the source tree, whatever version is installed."""
    parser = ConfigParser()
    parser.read(Path(__file__).parents[3] / "setup.cfg")
    lines = parser["options.entry_points"][extensions.ADAPTERS].strip().splitlines()
    points = [EntryPoint(*map(str.strip, line.split("=")), group=extensions.ADAPTERS) for line in lines]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points if group == extensions.ADAPTERS else [])


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
