"""What the doors have no counterpart for can be imported, subclassed and used as an annotation; a call, or a trainer that gets it, is an error."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, Optional, Protocol, TypeVar, runtime_checkable

import pytest
import torch
from engine.interop.lightning.fabric.utilities.exceptions import MisconfigurationException
from engine.interop.lightning.fabric.utilities.warnings import PossibleUserWarning
from engine.interop.lightning.utilities.rank_zero import rank_zero_only
from support.toys import Weight, fit, ones

import engine.interop.accelerate as A
import engine.interop.lightning as L

T = TypeVar("T")
QUIET: dict[str, Any] = {
    **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False),
    "max_epochs": 1,
}


class Net(L.LightningModule):
    """A module with the parts that the toys' :class:`Weight` has."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch.mean() * self.w).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


CLASSES = {
    "a callback": (
        L.pytorch.callbacks.pruning.ModelPruning,
        r"ModelPruning has no counterpart: use callbacks.Pruning .from callbacks import Pruning., .*before an epoch",
    ),
    "a strategy": (L.strategies.XLAStrategy, "XLAStrategy has no counterpart: XLA devices are not supported"),
    "an environment": (L.plugins.environments.SLURMEnvironment, "SLURMEnvironment has no counterpart: .*"),
    "a profiler": (L.profilers.AdvancedProfiler, "AdvancedProfiler has no counterpart: use SimpleProfiler"),
    "a loop": (L.loops.fit_loop._FitLoop, "the loops are functions"),
    "Fabric": (L.Fabric, "Fabric has no counterpart: use engine.Engine"),
    "a part of Fabric": (L.fabric.strategies.FSDPStrategy, "FSDPStrategy has no counterpart: .*engine.Engine"),
    "a hook": (A.hooks.AlignDevicesHook, "AlignDevicesHook has no counterpart: .*"),
    "a recipe": (A.utils.FP8RecipeKwargs, r"FP8RecipeKwargs has no counterpart: Engine\(precision="),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class(kind: str) -> None:
    cls, message = CLASSES[kind]

    class Mine(cls):  # type: ignore[misc, valid-type]
        def __init__(self) -> None: ...

    class Later(Mine, ABC, Generic[T]):
        @abstractmethod
        def method(self, other: cls | None, more: Optional[cls], items: list[cls]) -> cls: ...  # type: ignore[valid-type]  # noqa: UP045

    for made in (cls, Mine, Later):
        with pytest.raises(NotImplementedError, match=message):
            made()
    with pytest.raises(AttributeError, match=message):
        Mine.detect()
    assert not isinstance(3, cls)
    assert cls[int] is cls  # type: ignore[index]
    assert not hasattr(cls, "__wrapped__")


def test_a_function_and_an_object() -> None:
    with pytest.raises(NotImplementedError, match="_register_ddp_comm_hook has no counterpart"):
        L.overrides.distributed._register_ddp_comm_hook(None)
    with pytest.raises(NotImplementedError, match=r"dispatch_model has no counterpart: a model over several devices"):
        A.dispatch_model(None)
    registry = L.strategies.StrategyRegistry
    with pytest.raises(AttributeError, match="StrategyRegistry has no counterpart"):
        registry.register("mine")
    for use in (lambda: registry["ddp"], lambda: "ddp" in registry, lambda: bool(registry), lambda: [*registry]):
        with pytest.raises(NotImplementedError, match="StrategyRegistry has no counterpart"):
            use()


@pytest.mark.parametrize(
    "arguments",
    [
        {"callbacks": [L.callbacks.ModelPruning]},
        {"callbacks": L.callbacks.ThroughputMonitor},
        {"strategy": L.strategies.XLAStrategy},
        {"plugins": [L.plugins.environments.SLURMEnvironment]},
        {"profiler": L.profilers.AdvancedProfiler},
        {"logger": L.loggers.comet.CometLogger},
        {"accelerator": L.accelerators.CPUAccelerator},
    ],
)
def test_a_trainer_that_gets_one(arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"Trainer: \w+ has no counterpart: "):
        L.Trainer(**arguments)


def test_an_accelerator_that_gets_one() -> None:
    with pytest.raises(NotImplementedError, match="Accelerator: FP8RecipeKwargs has no counterpart"):
        A.Accelerator(kwargs_handlers=[A.utils.FP8RecipeKwargs])


def test_errors_enums_and_values_are_real() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=PossibleUserWarning)
        warnings.warn("x", PossibleUserWarning, stacklevel=1)
    with pytest.raises(MisconfigurationException):
        raise MisconfigurationException
    assert [*L.callbacks.timer.Interval] == ["step", "epoch"]
    assert torch.finfo(torch.float32).eps == L.utilities.FLOAT32_EPSILON
    assert L.pytorch.__version__ == L.__version__
    assert int(L.__version__.split(".")[0]) >= 2
    assert A.utils.constants.SAFE_WEIGHTS_NAME == "model.safetensors"
    assert L.fabric.utilities.types.ReduceOp is torch.distributed.ReduceOp


def test_protocols_are_real() -> None:
    """They stand beside ``Protocol`` among a class's bases, and ``isinstance`` looks for their members."""
    types = L.fabric.utilities.types

    @runtime_checkable
    class Growing(types.Optimizable, Protocol):  # type: ignore[name-defined, misc]
        def add_param_group(self, group: dict[str, Any]) -> None: ...

    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    for protocol in (Growing, types.Optimizable, types.Steppable, types._Stateful[str]):
        assert isinstance(optimizer, protocol)
        assert not isinstance(3, protocol)
    assert issubclass(torch.optim.SGD, types.Steppable)

    class Mine(types.Optimizable):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.param_groups: list[Any] = []

    assert Mine().param_groups == []


def test_a_module_that_only_fits(tmp_path: Path) -> None:
    class Old(Net):
        def test_epoch_end(self, outputs: Any) -> None: ...

    trainer, module = L.Trainer(default_root_dir=tmp_path, **QUIET), Old()
    with pytest.warns(UserWarning, match="Old.test_epoch_end is never called"):
        trainer.fit(module, ones(2))
    assert module.w.item() == -2.0
    with pytest.raises(TypeError, match="Old defines test_epoch_end, which is not called: define on_test_epoch_end"):
        trainer.test(module, ones(1))


@pytest.mark.parametrize(
    ("form", "messages"),
    [
        (
            lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "intervall": "step"}},
            ["'intervall' in lr_scheduler"],
        ),
        (
            lambda o, s: ([o], [{"scheduler": s, "lr": 3, "opt_idx": 0}]),
            ["'lr' in lr_scheduler", "'opt_idx' in lr_scheduler"],
        ),
        (lambda o, s: ([o], {"scheduler": s, "more": 1}), ["'more' in lr_scheduler"]),
        (lambda o, s: [{"optimizer": o, "lr_scheduler": s, "frequency": 1}], ["'frequency'"]),
        (lambda o, s: {"optimizer": o, "lr_sheduler": s}, ["'lr_sheduler'"]),
    ],
)
def test_an_unknown_key_of_configure_optimizers(form: Any, messages: list[str], tmp_path: Path) -> None:
    """As in Lightning, a warning; a ``TrainModule`` keeps its error."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return form(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))

    module = Scheduled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        L.Trainer(default_root_dir=tmp_path, **QUIET).fit(module, ones(1))
    texts = [str(warning.message) for warning in seen]
    assert [text.removeprefix("configure_optimizers: unknown key ").partition(";")[0] for text in texts] == messages
    assert all(text.endswith("; it is left out") for text in texts)
    assert module.w.item() != 0.0


def test_an_unknown_key_in_a_module_of_ours(tmp_path: Path) -> None:
    module = Weight()
    module.configure_optimizers = lambda: {"optimizer": torch.optim.SGD(module.parameters(), 1.0), "more": 1}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="unknown key 'more'"):
        fit(tmp_path).run(module, ones(1))


def test_the_rank_of_rank_zero_only(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("lightning_utilities.core.rank_zero").rank_zero_only
    called: list[int] = []
    log = rank_zero_only(called.append)
    assert theirs.rank == rank_zero_only.rank == 0
    theirs(called.append)(1)
    log(2)
    monkeypatch.setattr(rank_zero_only, "_set", None)
    rank_zero_only.rank = 1
    log(3)
    assert called == [1, 2]
    assert rank_zero_only(called.append, default=5)(4) == 5
