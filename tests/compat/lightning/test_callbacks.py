"""Lightning's callbacks and loggers under this library: names, arguments, signatures."""

from __future__ import annotations

import csv
import functools
import inspect
import types
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import lightning.pytorch.profilers
import lightning.pytorch.strategies
import pytest
import torch
from both import EVENTS, OURS, THEIRS, data, module, quietly, trainer

from engine import Fit
from engine.compat.lightning.arguments import CALLBACKS, LOGGERS, STRATEGIES
from engine.compat.lightning.strategy_arguments import strategy
from engine.interop.lightning import callbacks, loggers, strategies


def test_every_callback_of_lightning_has_its_name() -> None:
    missing = [name for name in lightning.pytorch.callbacks.__all__ if not hasattr(callbacks, name)]
    assert missing == []


@pytest.mark.parametrize("name", lightning.pytorch.callbacks.__all__)
def test_arguments_of_callbacks_are_lightnings(name: str) -> None:
    ours, theirs = getattr(callbacks, name), getattr(lightning.pytorch.callbacks, name)
    if name != "LambdaCallback" and not hasattr(ours, "refused"):
        assert named(ours) == named(theirs)


def named(call: Any) -> list[str]:
    """The arguments that a call has by name."""
    parameters = inspect.signature(call).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(
    ("library", "table"),
    [
        (lightning.pytorch.callbacks, CALLBACKS),
        (lightning.pytorch.loggers, LOGGERS),
        (lightning.pytorch.strategies, STRATEGIES),
    ],
)
def test_what_a_class_does_not_take_is_an_argument_of_lightnings(library: Any, table: Any) -> None:
    for name, rows in table.items():
        theirs = getattr(library, name, None) or getattr(lightning.pytorch.profilers, name)
        passes_on = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(theirs).parameters.values())
        unknown = {argument for argument, row in rows.items() if row.neutral} - set(named(theirs))
        assert not unknown or passes_on, name


def test_events_in_which_a_class_of_lightnings_does_nothing_may_be_overridden(tmp_path: Path) -> None:
    """Scripts do not call ``super()`` there. Each class says in which events it works and Lightning's does not."""
    bases: Any = lightning.pytorch.callbacks.Callback, callbacks.Callback
    for name in lightning.pytorch.callbacks.__all__:
        kinds = getattr(lightning.pytorch.callbacks, name), getattr(callbacks, name, None)
        if inspect.isclass(kinds[1]) and issubclass(kinds[1], callbacks.Callback):
            theirs, ours = (
                {event for event in EVENTS if getattr(kind, event) is not getattr(base, event)}
                for kind, base in zip(kinds, bases, strict=True)
            )
            without = {"GradientAccumulationScheduler", "BatchSizeFinder", "LearningRateFinder"}  # they only check
            assert name in without or ours - theirs <= set(kinds[1].needed), name


@pytest.mark.parametrize("library", [THEIRS, OURS])
@pytest.mark.parametrize("way", ["replaced", "with super", "of a mixin", "twice"])
def test_a_callback_works_whose_start_and_end_are_overridden(library: Any, way: str, tmp_path: Path) -> None:
    calls: list[str] = []
    L = library.callbacks

    class Told:
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            calls.append(type(self).__name__)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            calls.append(type(self).__name__)

    def made(kind: Any, name: str) -> Any:
        if way == "of a mixin":
            return type(name, (Told, kind), {})
        if way == "with super":

            def on_train_start(self: Any, trainer: Any, pl_module: Any) -> None:
                kind.on_train_start(self, trainer, pl_module)
                calls.append(name)

            return type(name, (kind,), {"on_train_start": on_train_start, "on_train_end": Told.on_train_end})
        hooks = {"on_train_start": Told.on_train_start, "on_train_end": Told.on_train_end}
        first = type(name, (kind,), dict(hooks))
        return first if way == "replaced" else type(name, (first,), hooks)

    stop = made(L.EarlyStopping, "Stop")("score", patience=1, mode="max")
    saves = made(L.ModelCheckpoint, "Saves")(tmp_path, monitor="score", mode="max")

    class Falls(L.Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("score", torch.tensor(-float(trainer.current_epoch)))

    options: dict[str, Any] = {
        "callbacks": [Falls(), stop, saves],
        "max_epochs": 6,
        "limit_train_batches": 2,
        "enable_checkpointing": True,
    }
    fitted = trainer(library, tmp_path, num_sanity_val_steps=0, **options)
    quietly(fitted.fit, module(library), data(), data())
    assert fitted.global_step == 4  # the second epoch's score is lower
    assert Path(saves.best_model_path).name == "epoch=0-step=2.ckpt"
    assert calls == ["Stop", "Saves"] * 2


def test_a_callback_that_extends_one_of_ours_gets_a_trainer(tmp_path: Path) -> None:
    class Stops(OURS.callbacks.EarlyStopping):  # type: ignore[misc]
        checked = 0

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.global_step == 10 * (trainer.current_epoch + 1)
            self.checked += 1
            super().on_validation_end(trainer, pl_module)

    stops = Stops("val", patience=1, min_delta=10.0)
    fitted = trainer(OURS, tmp_path, callbacks=[stops], max_epochs=5, num_sanity_val_steps=0)
    fitted.fit(module(OURS), data(), data())
    assert (stops.checked, stops.wait_count, fitted.current_epoch) == (2, 1, 2)
    again = Stops("val", patience=1, min_delta=10.0)  # and in a plain Fit
    Fit(max_epochs=5, accelerator="cpu", callbacks=[again], num_sanity_val_steps=0, root_dir=tmp_path).run(
        module(OURS), data(), data()
    )
    assert again.checked == 2


@pytest.mark.parametrize("library", [OURS, THEIRS])
def test_hooks_of_every_kind_are_called_with_a_trainer(library: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hooks(library.Callback):  # type: ignore[misc]
        @staticmethod
        def on_fit_start(trainer: Any, pl_module: Any) -> None:
            seen.append(("static", trainer.max_epochs, pl_module.automatic_optimization))

        @classmethod
        def on_train_start(cls, trainer: Any, pl_module: Any) -> None:
            seen.append((cls.__name__, trainer.max_epochs))

        def note(self, what: str, trainer: Any, pl_module: Any) -> None:
            seen.append((what, trainer.max_epochs))

        on_train_epoch_start = functools.partialmethod(note, "partial")
        on_train_end = None

        def setup(self, trainer: Any, pl_module: Any, stage: Any) -> None:
            super().setup(trainer, pl_module, stage=stage)

    hooks = Hooks()
    hooks.on_train_epoch_end = lambda trainer, pl_module: seen.append(("object", trainer.max_epochs))
    hooks.on_fit_end = types.MethodType(
        lambda self, trainer, pl_module: seen.append((type(self), trainer.max_epochs)), hooks
    )
    fit = Fit(max_epochs=3, accelerator="cpu", callbacks=[hooks], root_dir=tmp_path)
    for run in (trainer(library, tmp_path, max_epochs=3, callbacks=[hooks]).fit, fit.run):
        seen.clear()
        quietly(run, module(library), data(4))
        epochs = [("partial", 3), ("object", 3)] * 3
        assert seen == [("static", 3, True), ("Hooks", 3), *epochs, (Hooks, 3)]


class Fewer(THEIRS.Callback):  # type: ignore[misc]
    def on_train_end(self, trainer: Any) -> None: ...


class StaticFewer(OURS.Callback):  # type: ignore[misc]
    @staticmethod
    def on_train_end(trainer: Any) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        Fewer,
        StaticFewer,
        lambda: OURS.callbacks.LambdaCallback(on_train_end=lambda trainer: None),
        lambda: THEIRS.callbacks.LambdaCallback(on_train_end=lambda trainer: None),
    ],
)
def test_a_hook_that_takes_other_arguments_is_an_error_before_the_first_step(make: Any, tmp_path: Path) -> None:
    net = module(OURS)
    with pytest.raises(
        TypeError,
        match=r"on_train_end\(trainer\) cannot be called: a run gives it \((trainer, pl_module|run, module)\)",
    ):
        Fit(max_epochs=1, accelerator="cpu", callbacks=[make()], root_dir=tmp_path).run(net, data())
    assert net.seen == []


def test_averages_are_lightnings(tmp_path: Path) -> None:
    average = OURS.callbacks.EMAWeightAveraging(decay=0.5)
    trainer(OURS, tmp_path, callbacks=[average], max_epochs=1).fit(module(OURS), data(), data())


def test_what_a_callback_returns_has_no_meaning(tmp_path: Path) -> None:
    skips = OURS.callbacks.LambdaCallback(on_train_batch_start=lambda *args: -1)
    fitted = trainer(OURS, tmp_path, callbacks=[skips], max_epochs=1)
    fitted.fit(module(OURS), data())
    assert fitted.global_step == 10


def test_numbers_of_predicted_samples_are_lightnings(tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        seen: list[Any] = []

        class Writes(library.callbacks.BasePredictionWriter):  # type: ignore[misc, name-defined]
            def write_on_batch_end(
                self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any, seen: Any = seen
            ) -> None:
                seen.append(batch_indices)

            def write_on_epoch_end(
                self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any, seen: Any = seen
            ) -> None:
                seen.append(batch_indices)

        quietly(trainer(library, tmp_path, callbacks=[Writes("batch_and_epoch")]).predict, module(library), data(10))
        found.append(seen)
    assert found[1] == found[0]
    assert found[1] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]]


def test_metrics_of_a_progress_bar_may_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Renames(OURS.callbacks.RichProgressBar):  # type: ignore[misc]
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            metrics = super().get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            return {f"my_{name}_{trainer.current_epoch}": value for name, value in metrics.items()}

    fitted = trainer(OURS, tmp_path, callbacks=[Renames()], max_epochs=1, enable_progress_bar=None)
    fitted.fit(module(OURS), data())
    assert "my_loss" in capsys.readouterr().out


def test_scores_of_checkpoints_are_lightnings(tmp_path: Path) -> None:
    found = []
    for library in (THEIRS, OURS):
        saves = library.callbacks.ModelCheckpoint(tmp_path / str(len(found)), monitor="val", save_top_k=2)
        seen: list[Any] = [(float(saves.kth_value), saves.kth_best_model_path)]
        quietly(
            trainer(library, tmp_path, callbacks=[saves], max_epochs=3, enable_checkpointing=True).fit,
            module(library), data(), data(),
        )  # fmt: skip
        found.append([*seen, (pytest.approx(float(saves.kth_value)), Path(saves.kth_best_model_path).name)])
    assert found[1] == found[0]


def test_a_file_that_lightning_has_left_stays(tmp_path: Path) -> None:
    paths = []
    for library in (THEIRS, OURS):
        folder = tmp_path / str(len(paths))
        folder.mkdir()
        torch.save({"state_dict": {}}, folder / "best.ckpt")
        before = (folder / "best.ckpt").read_bytes()
        saves = library.callbacks.ModelCheckpoint(folder, filename="best", monitor="val")
        quietly(
            trainer(library, tmp_path, callbacks=[saves], max_epochs=1, enable_checkpointing=True).fit,
            module(library), data(), data(),
        )  # fmt: skip
        assert (folder / "best.ckpt").read_bytes() == before
        paths.append(Path(saves.best_model_path).name)
    assert paths == ["best-v1.ckpt", "best-v1.ckpt"]


def test_a_checkpoint_callback_that_saves_by_itself_is_refused_when_it_is_made_not_when_a_package_defines_it() -> None:
    Own = type("Own", (callbacks.ModelCheckpoint,), {"_save_checkpoint": lambda self, trainer, filepath: None})
    with pytest.raises(TypeError, match="Own defines _save_checkpoint, which is not called: on_checkpoint_saved"):
        Own()


def test_predictions_are_written(tmp_path: Path) -> None:
    class Writes(OURS.callbacks.BasePredictionWriter):  # type: ignore[misc]
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            torch.save(predictions, tmp_path / "predictions.pt")

    found = trainer(OURS, tmp_path, callbacks=[Writes("epoch")]).predict(module(OURS), data())
    torch.testing.assert_close(torch.load(tmp_path / "predictions.pt"), found)


@pytest.mark.parametrize(
    ("make", "error", "instead"),
    [
        (lambda: callbacks.RichProgressBar(theme="x"), ValueError, "console"),
        (lambda: callbacks.WeightAveraging(device="cpu"), ValueError, "device of the weights"),
        (lambda: callbacks.ModelCheckpoint(every_n_epochs=2, every_n_train_steps=3), ValueError, "one of them"),
        (lambda: callbacks.LambdaCallback(on_nothing=print), TypeError, "not an event"),
        (lambda: loggers.CSVLogger("x", prefix="y"), ValueError, "names that you log"),
        (lambda: strategies.FSDPStrategy(sharding_strategy="NO_SHARD"), ValueError, "ddp"),
        (lambda: callbacks.ModelPruning("x"), NotImplementedError, "callbacks.Pruning"),
    ],
)
def test_what_has_no_counterpart_says_what_to_use(make: Any, error: type[Exception], instead: str) -> None:
    with pytest.raises(error, match=instead):
        make()


def test_loggers(tmp_path: Path) -> None:
    class Keeps(OURS.loggers.Logger):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.seen.append((step, sorted(metrics)))

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.seen.append(params)

        def finalize(self, status: str) -> None:
            self.seen.append(status)

    keeps, rows = Keeps(), OURS.loggers.CSVLogger(tmp_path, name="mine")
    fitted, net = trainer(OURS, tmp_path, logger=[keeps, rows], max_epochs=1, log_every_n_steps=5), module(OURS)
    fitted.fit(net, data())
    assert keeps.seen[0] == {"width": 5, "lr": 0.05}
    assert keeps.seen[1] == (1, ["epoch", "loss_step"])
    assert keeps.seen[-1] == "success"
    assert fitted.logger is keeps
    assert fitted.loggers[1].log_dir == str(tmp_path / "mine" / "version_0")
    with (tmp_path / "mine" / "version_0" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["loss_step"]] == ["1", "5", "10"]


def test_names_of_strategies() -> None:
    assert strategy("ddp_find_unused_parameters_true") == {"name": "ddp", "find_unused_parameters": True}
    assert strategy("ddp_spawn") == "ddp"
    assert strategies.DDPStrategy(find_unused_parameters=True, start_method="fork").find_unused_parameters
    wrapped = strategies.FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, sharding_strategy="SHARD_GRAD_OP")
    assert (wrapped.blocks, wrapped.reshard_after_forward) == ((torch.nn.Linear,), False)
