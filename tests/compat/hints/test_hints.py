"""Names of Lightning's, Fabric's and Accelerate's calls and attributes: each is ours, or its error says what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toys import Weight, fit, ones

import callbacks
import engine
from engine import Callback, Engine, Fit, TrainModule
from engine.compat.names import ARGUMENTS, ATTRIBUTES
from engine.loop.run import Run


class Spy(Callback):
    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        self.run = run


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One object of each class whose attributes have answers."""
    spy = Spy()
    trainer = fit(tmp_path_factory.mktemp("run"), callbacks=spy)
    result = trainer.run(Weight(), ones(2))
    return {"Fit": trainer, "Run": spy.run, "Result": result, "Engine": spy.run.engine}


def owner_of(call: str) -> Any:
    name = call.partition(".")[0]
    return getattr(engine, name, None) or getattr(callbacks, name)


@pytest.mark.parametrize("call", ARGUMENTS)
def test_an_argument_with_an_answer_is_not_ours_and_says_what_to_write(call: str) -> None:
    owner = owner_of(call)
    method = getattr(owner, call.partition(".")[2])
    known = inspect.signature(method).parameters
    assert not set(ARGUMENTS[call]) & set(known)
    assert {new for said in ARGUMENTS[call].values() for new in re.findall(r"here it is called '(\w+)'", said)} <= set(
        known
    )
    if owner is TrainModule:
        return  # no step pays for them: the run explains their errors, as below
    required = [
        each for each in known.values() if each.default is each.empty and each.kind == each.POSITIONAL_OR_KEYWORD
    ]
    for name, said in ARGUMENTS[call].items():
        with pytest.raises(
            TypeError, match=rf"^{re.escape(call)}\(\) got an unexpected keyword argument '{name}'; {re.escape(said)}$"
        ):
            method(*[None] * len(required), **{name: 1})


def test_log_explains_its_arguments_within_a_run(tmp_path: Path) -> None:
    class Logs(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_stp=True)  # type: ignore[call-arg]

    with pytest.raises(
        TypeError, match=r"TrainModule\.log\(\) got an unexpected keyword argument 'on_stp'; did you mean 'on_step'"
    ):
        fit(tmp_path).run(Logs(), ones(1))


def test_nothing_is_wrapped_that_a_step_calls() -> None:
    for name in ("log", "log_dict", "all_gather", "optimizers", "manual_backward"):
        assert not hasattr(getattr(TrainModule, name), "__wrapped__")
    for name in ("accumulate", "backward", "step", "clip_grad_norm_", "autocast", "enter_window"):
        assert f"Engine.{name}" not in ARGUMENTS
    for owner in (Engine, Run):  # a __getattr__ would slow down every attribute
        assert not hasattr(owner, "__getattr__")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Engine(mixed_precision="bf16"), "'mixed_precision'; here it is called 'precision'"),
        (lambda: Engine(gradient_accumulation_steps=4), "here it is called 'accumulate_grad_batches'"),
        (lambda: Engine(cpu=True), "here it is accelerator='cpu'"),
        (lambda: Engine(precison="32-true"), "did you mean 'precision'?"),
        (lambda: Engine(max_epochs=3), "here it is a setting: Fit(max_epochs=...)"),
        (lambda: Engine(num_epochs=3), "here it is a setting: Fit(max_epochs=...)"),
        (lambda: Engine(deepspeed_plugin=None), "strategy={'name': 'deepspeed'"),
        (lambda: Fit().run(None, max_epochs=3), "here it is a setting: Fit(max_epochs=...)"),
        (lambda: Fit().run(None, train_loder=[]), "did you mean 'train_loader'?"),
        (lambda: Fit().run(model=None, train_dataloaders=[]), "'model'; here it is called 'module'"),
        (lambda: callbacks.EarlyStopping("loss", patiense=3), "did you mean 'patience'?"),
        (lambda: callbacks.EMA(device="cpu"), "'device'; averages are on the device of the weights"),
        (lambda: callbacks.Profiler(sort_by_key="x"), "'sort_by_key'; give sort_by"),
    ],
)
def test_other_wrong_arguments(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call()


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_of_others_say_what_to_use(kind: str, objects: dict[str, Any]) -> None:
    found = objects[kind]
    for name, said in ATTRIBUTES[kind].items():
        with pytest.raises(AttributeError, match=rf"^'{kind}' object has no attribute '{name}': {re.escape(said)}$"):
            getattr(found, name)
        with pytest.raises(AttributeError, match=re.escape(said)):
            setattr(found, name, 1)  # run.should_stop = True would be ignored
        assert not hasattr(found, name)
        assert name not in dir(found)
        used = re.match(r"(?:use|call) (?:settings\.)?(\w+)", said)
        if used is not None and used[1] not in ("Result", "the", "torch", "tensor", "engine", "print"):
            assert hasattr(found.settings if "settings." in said else found, used[1]), said
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute 'other'"):
        _ = found.other


def test_errors_of_other_calls_stay_as_they_are(tmp_path: Path) -> None:
    def wrong() -> None: ...

    class Calls(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wrong(sync_dist=True)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"wrong\(\) got an unexpected keyword argument 'sync_dist'$"):
        fit(tmp_path).run(Calls(), ones(1))


@pytest.mark.parametrize("method", [Fit.run, Fit.validate, Fit.test, Fit.predict])
def test_fits_methods_are_called_without_a_frame_between(method: Callable[..., Any], tmp_path: Path) -> None:
    assert not hasattr(method, "__wrapped__")
    assert method.__code__.co_filename == inspect.getsourcefile(Fit)
    parameters = inspect.signature(method).parameters
    assert parameters["module"].default is inspect.Parameter.empty
    assert not [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    trainer = fit(tmp_path)
    with pytest.raises(
        TypeError, match=rf"^{method.__qualname__}\(\) missing 1 required positional argument: 'module'$"
    ):
        method(trainer)
    with pytest.raises(
        TypeError, match=rf"^{method.__qualname__}\(\) got an unexpected keyword argument 'dataloaders'"
    ):
        method(trainer, Weight(), dataloaders=ones(1))


def test_a_wrapped_constructor_keeps_its_signature() -> None:
    assert list(inspect.signature(callbacks.EarlyStopping).parameters)[:2] == ["monitor", "min_delta"]
    assert "Args:" in (inspect.getdoc(callbacks.EarlyStopping.__init__) or "")
