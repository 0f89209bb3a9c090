"""Every public name of Lightning's classes is ours with the same meaning, or has an entry that says what to use; every hook is called."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_script
from support.toys import Weight, fit, ones
from torch import nn

from engine import Callback, DataModule, TrainModule
from engine.compat.lightning.arguments import TRAINER
from engine.compat.lightning.checks import refuse_replaced
from engine.compat.lightning.names import DATA, MODULE, REPLACED
from engine.compat.lightning.trainer import Trainer
from engine.compat.names import ARGUMENTS, ATTRIBUTES
from engine.config.settings import Settings
from engine.utils.extensions import hint

NAMES = """
import inspect, json, os, warnings
warnings.simplefilter("ignore")
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn

def public(owner, base):
    return sorted(name for name in {*dir(type(owner)), *vars(owner)} if not name.startswith("_") and not hasattr(base, name))

hooks = sorted({name for each in (CheckpointHooks, DataHooks, ModelHooks) for name in vars(each) if not name.startswith("_")})
import callbacks, engine
import lightning.pytorch.callbacks as theirs
from accelerate import Accelerator
from lightning import Fabric
from lightning.pytorch.loggers import CSVLogger

def parameters(call):
    return {name for name, each in inspect.signature(call).parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}

of_engine = ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer", "save_state", "save_model", "unwrap_model",
    "skip_first_batches", "gather", "reduce", "pad_across_processes")
of_callbacks = ("ModelCheckpoint", "EarlyStopping", "RichProgressBar", "TQDMProgressBar", "ModelSummary",
    "LearningRateMonitor")
calls = {
    "Fit.run": Trainer.fit, "Fit.validate": Trainer.validate, "Fit.test": Trainer.test, "Fit.predict": Trainer.predict,
    "TrainModule.log": LightningModule.log, "TrainModule.save_hyperparameters": LightningModule.save_hyperparameters,
    "Engine.__init__": Accelerator, "CSVLogger.__init__": CSVLogger,
    **{f"Engine.{name}": getattr(Accelerator, name) for name in of_engine},
    **{f"{name}.__init__": getattr(theirs, name) for name in of_callbacks},
}
arguments = {}
for call, other in calls.items():
    owner, _, name = call.partition(".")
    arguments[call] = sorted(parameters(other) - parameters(getattr(getattr(engine, owner, None) or getattr(callbacks, owner), name)))

report({
    "arguments": arguments, "fabric": sorted(name for name in dir(Fabric) if not name.startswith("_") and not hasattr(engine.Engine, name)),
    "module": sorted({*public(LightningModule(), nn.Module())} - {*engine.TrainModule.__annotations__}),
    "data": sorted({*public(LightningDataModule(), object())} - {*engine.DataModule.__annotations__}),
    "callback": public(Callback(), object()), "hooks": hooks,
    "trainer": list(inspect.signature(Trainer).parameters),
})
"""


@pytest.fixture(scope="module")
def lightning() -> dict[str, list[str]]:
    pytest.importorskip("lightning")
    found: dict[str, list[str]] = run_script(NAMES, timeout=240).value
    return found


def test_every_name_of_lightnings_classes_is_ours_or_has_an_answer(lightning: dict[str, list[str]]) -> None:
    answers_of = (
        ("module", TrainModule, {**MODULE, **REPLACED}),
        ("data", DataModule, DATA),
        ("callback", Callback, {}),
    )
    for kind, ours, answers in answers_of:
        assert [name for name in lightning[kind] if not hasattr(ours, name) and name not in answers] == []
        assert [name for name in answers if hasattr(ours, name)] == []
    assert set(MODULE) <= set(lightning["module"])
    assert set(DATA) <= set(lightning["data"])


def test_every_argument_of_lightnings_trainer_is_a_setting_or_has_an_answer(lightning: dict[str, list[str]]) -> None:
    settings = {field.name for field in fields(Settings)}
    other = [name for name in lightning["trainer"] if name not in settings]
    answers = {name: hint("setting", name) for name in other}
    assert [name for name, answer in answers.items() if not answer] == []
    assert len(other) < len(lightning["trainer"]) / 2


def test_the_table_has_the_arguments_of_trainer(lightning: dict[str, list[str]]) -> None:
    ours = {name: each.default for name, each in inspect.signature(Trainer).parameters.items()}
    assert list(ours.items()) == [(name, argument.usual) for name, argument in TRAINER.items()]
    assert lightning["trainer"] == list(TRAINER)
    assert {argument.setting for argument in TRAINER.values()} - {field.name for field in fields(Settings)} == {""}


def test_every_argument_of_their_calls_is_ours_or_has_an_answer(lightning: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    for call, names in lightning["arguments"].items():
        for name in names:
            assert name in ARGUMENTS.get(call, ()) or (call == "Engine.__init__" and hint("setting", name)), (
                f"{call}({name}=)"
            )
    assert set(lightning["fabric"]) - set(ATTRIBUTES["Engine"]) == {"strategy"}  # every Engine object has it


class Saves(Callback):
    def on_train_end(self, run: Any, module: Any) -> None:
        run.save_checkpoint()


def test_every_hook_is_called(lightning: dict[str, list[str]], tmp_path: Path) -> None:
    of_step = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
    of_run = (
        "configure_callbacks",
        "configure_optimizers",
        "training_step",
        "validation_step",
        "test_step",
        "predict_step",
    )
    expected = {*lightning["hooks"], *of_step, *of_run} - {"configure_sharded_model"}
    module, seen = Weight(), set()
    module.configure_optimizers = lambda: scheduled(module)  # type: ignore[method-assign]
    for name in expected:
        found = getattr(module, name)
        loader = ones(1) if name.endswith("_dataloader") else None
        setattr(
            module,
            name,
            lambda *args, found=found, name=name, loader=loader, **kw: (seen.add(name), loader or found(*args, **kw))[
                1
            ],
        )
    trainer = fit(tmp_path, callbacks=Saves())
    trainer.run(module)
    trainer.run(module, resume="last")
    trainer.validate(module)
    trainer.test(module)
    trainer.predict(module)
    assert expected - seen == set()


def scheduled(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def test_a_hook_that_is_never_called_is_refused(tmp_path: Path) -> None:
    class Old(Weight):
        def training_epoch_end(self, outputs: Any) -> None: ...

    class OldCallback(Callback):
        def on_batch_end(self, *args: Any) -> None: ...

    with pytest.raises(
        TypeError, match="Old defines training_epoch_end, which is not called: define on_train_epoch_end"
    ):
        fit(tmp_path).run(Old(), ones(1))
    with pytest.raises(
        TypeError, match="OldCallback defines on_batch_end, which is not called: define on_train_batch_end"
    ):
        fit(tmp_path, callbacks=OldCallback()).run(Weight(), ones(1))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *(("test_epoch_end", {"test"}), ("test_step_end", {"test"}), ("on_test_dataloader", {"test"})),
        *(("predict_epoch_end", {"predict"}), ("on_predict_dataloader", {"predict"})),
        *(("validation_epoch_end", {"fit", "validate"}), ("on_val_dataloader", {"fit", "validate"})),
        *(("training_step_end", {"fit"}), ("tbptt_split_batch", {"fit"}), ("on_pretrain_routine_start", {"fit"})),
        ("on_keyboard_interrupt", {"fit", "validate", "test", "predict"}),
    ],
)
def test_an_old_hook_matters_only_to_a_run_that_would_call_it(name: str, stages: set[str], tmp_path: Path) -> None:
    old = type("Old", (Weight,), {name: lambda self, *args: None})
    found, trainer = set(), fit(tmp_path)
    for stage, run in zip(
        ("fit", "validate", "test", "predict"),
        (trainer.run, trainer.validate, trainer.test, trainer.predict),
        strict=True,
    ):
        try:
            run(old(), ones(1))
        except TypeError as error:
            assert str(error).startswith(f"Old defines {name}, which is not called: define ")  # noqa: PT017
            found.add(stage)
    assert found == stages


def test_a_method_of_its_own_with_an_old_hooks_name_is_left_alone(tmp_path: Path) -> None:
    class Own(Weight):
        def on_epoch_end(self, outputs: Any) -> None: ...

    class Old(Weight):
        def on_epoch_end(self) -> None: ...

    class OldCallback(Callback):
        def on_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    fit(tmp_path, callbacks=Callback()).run(Own(), ones(1))
    for module, callbacks in ((Old(), []), (Own(), OldCallback())):
        with pytest.raises(TypeError, match="defines on_epoch_end, which is not called"):
            fit(tmp_path, callbacks=callbacks).run(module, ones(1))


def test_attributes_that_ours_do_not_have() -> None:
    with pytest.raises(AttributeError, match=r"'Weight' object has no attribute 'fabric': .*engine.Engine"):
        _ = Weight().fabric
    with pytest.raises(AttributeError, match="'DataModule' object has no attribute 'name': "):
        _ = DataModule().name
    with pytest.raises(AttributeError, match=r"'Weight' object has no attribute 'other'$"):
        _ = Weight().other
    assert not hasattr(Weight(), "fabric")


def test_short_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Calls(Weight):
        def on_fit_start(self) -> None:
            self.print("hello", end="!")
            found = self.all_gather({"x": torch.ones(2), "n": 3}, sync_grads=True)
            assert (found["x"].tolist(), found["n"].item()) == ([1.0, 1.0], 3)
            assert self.optimizers(use_pl_optimizer=False) is self.optimizers()
            assert self.local_rank == 0

        def optimizer_step(self, *args: Any) -> None:
            with self.toggled_optimizer(self.optimizers()):
                super().optimizer_step(*args)

    module = Calls()
    fit(tmp_path).run(module, ones(1))
    assert capsys.readouterr().out == "hello!"
    assert module.freeze() is module
    assert (module.training, module.w.requires_grad) == (False, False)
    assert module.unfreeze() is module
    assert (module.training, module.w.requires_grad) == (True, True)


def test_a_modules_own_callbacks_take_the_place_of_others_of_their_class(tmp_path: Path) -> None:
    seen: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_fit_start(self, run: Any, module: Any) -> None:
            seen.append(self.name)

    class Other(Named): ...

    class Own(Weight):
        def configure_callbacks(self) -> Any:
            return Named("own")

    fit(tmp_path, callbacks=[Named("given"), Other("other")]).run(Own(), ones(1))
    assert seen == ["other", "own"]
    module = Weight()
    module.configure_callbacks = lambda: [print]  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"Weight.configure_callbacks has <built-in function print>"):
        fit(tmp_path).run(module, ones(1))


def test_a_data_modules_hooks_win(tmp_path: Path) -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[BaseException] = []

        def train_dataloader(self) -> Any:
            return ones(2)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 1

        def on_exception(self, exception: BaseException) -> None:
            self.told.append(exception)

    class Own(Weight):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 3

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError

    module, data = Own(), Data()
    with pytest.warns(
        UserWarning, match="both Own and Data define on_after_batch_transfer: the data module's is called"
    ):
        fit(tmp_path).run(module, datamodule=data)
    assert module.w.item() == -8.0
    error = OSError()
    module.on_train_start = lambda: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
    with pytest.raises(OSError):
        fit(tmp_path).run(module, datamodule=data)
    assert data.told == [error]


def test_a_module_that_takes_what_fits(tmp_path: Path) -> None:
    class Larger(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.more, self.strict_loading = nn.Parameter(torch.zeros(1)), False

    trainer = fit(tmp_path, callbacks=Saves())
    trainer.run(Weight(), ones(1))
    found = trainer.validate(Larger(), ones(1), checkpoint="last")
    assert found[0]["val"] == -1.0


def test_a_method_that_the_class_calls_itself_is_its_own() -> None:
    class Own(TrainModule):
        def on_epoch_end(self, outputs: list[float]) -> None:
            pass

        def on_train_epoch_end(self) -> None:
            self.on_epoch_end([])

    class Old(TrainModule):
        def on_epoch_end(self) -> None:
            pass

    class Later(Old):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()

    refuse_replaced("fit", Own())
    for old in (Old(), Later()):
        with pytest.raises(TypeError, match="defines on_epoch_end, which is not called"):
            refuse_replaced("fit", old)
