"""TrainModule: hyperparameters, its view of the run, copies, and what it must define."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.utils.data import DataLoader

import engine.utils.log
from engine import Callback, TrainModule


class Base(TrainModule):
    def __init__(self, width: int = 2, *, depth: int = 1, **rest: Any) -> None:
        super().__init__()
        unrelated = 99  # noqa: F841  a local variable is not an argument
        self.save_hyperparameters()


class Derived(Base):
    def __init__(self, rate: float, width: int = 5) -> None:
        super().__init__(width, depth=3)


class Some(TrainModule):
    def __init__(self, rate: float, net: nn.Module, names: tuple[str, ...] = (), ignore: Any = ()) -> None:
        super().__init__()
        self.save_hyperparameters(*names, ignore=ignore)


def test_all_arguments_are_kept_and_are_attributes_too() -> None:
    module = Base(7, depth=2, extra="x")
    assert module.hparams == {"width": 7, "depth": 2, "extra": "x"}
    assert (module.hparams.width, module.hparams["depth"]) == (7, 2)
    assert Base().hparams == {"width": 2, "depth": 1}
    with pytest.raises(AttributeError, match=r"no hyperparameter 'widht'; there are: width, depth"):
        _ = Base().hparams.widht


def test_the_subclass_arguments_are_kept_by_the_call_in_the_base() -> None:
    assert Derived(0.5).hparams == {"rate": 0.5, "width": 5, "depth": 3}


def test_some_arguments() -> None:
    net = nn.Linear(1, 1)
    assert Some(0.1, net, ("rate",)).hparams == {"rate": 0.1}
    assert set(Some(0.1, net, ignore="net").hparams) == {"rate", "names", "ignore"}
    assert set(Some(0.1, net, ignore=["net", "ignore"]).hparams) == {"rate", "names"}
    with pytest.raises(ValueError, match=r"'rat'.*Some.__init__ has no such argument; it has rate, net, names, ignore"):
        Some(0.1, net, ("rat",))


def test_a_dict_is_kept_as_it_is_and_entries_can_be_added_and_removed() -> None:
    module = Weight()
    module.save_hyperparameters({"a": 1, "b": 2}, ignore="b")
    module.hparams.c = 3
    assert module.hparams == {"a": 1, "c": 3}
    del module.hparams.a
    assert module.hparams == {"c": 3}


def test_hyperparameters_are_in_the_checkpoint(tmp_path: Path) -> None:
    class Saves(Weight):
        def __init__(self, rate: float, shape: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def on_train_end(self) -> None:
            self._context.save_checkpoint()  # type: ignore[union-attr]

    fit(tmp_path).run(Saves(0.25, torch.Size([3])), ones(2))
    manifest = json.loads((tmp_path / "checkpoints" / "step=00000002" / "manifest.json").read_text())
    assert manifest["hparams"]["rate"] == 0.25
    assert "3" in manifest["hparams"]["shape"]


def test_log_outside_of_a_run_warns_once_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.utils.log, "_said", set())
    module = Weight()
    with pytest.warns(UserWarning, match=r"Weight.log\(\) outside a Fit run records nothing"):
        module.log("a", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.log("a", 1.0)
        module.log_dict({"b": 2.0})


def test_what_it_knows_outside_of_a_run() -> None:
    module = Weight().double()
    assert (module.global_step, module.current_epoch, module.global_rank, module.world_size) == (0, 0, 0, 1)
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float64)
    assert Base().dtype is torch.get_default_dtype()
    for call in (module.optimizers, module.lr_schedulers, lambda: module.manual_backward(torch.zeros(()))):
        with pytest.raises(RuntimeError, match="only possible during a Fit run"):
            call()


def test_what_it_knows_in_a_run(tmp_path: Path) -> None:
    seen = []

    class Knows(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            seen.append(
                (self.current_epoch, batch_idx, self.global_step, self.global_rank, self.world_size, str(self.device))
            )
            return super().training_step(batch, batch_idx)

    module = Knows()
    fit(tmp_path, max_epochs=2, accumulate_grad_batches=2).run(module, ones(3))
    # Windows of 2 and 1 micro-batches: two steps an epoch.
    assert [s[:3] for s in seen] == [(0, 0, 0), (0, 1, 0), (0, 2, 1), (1, 0, 2), (1, 1, 2), (1, 2, 3)]
    assert {s[3:] for s in seen} == {(0, 1, "cpu")}
    assert (module.current_epoch, module.global_step) == (2, 4)  # the run is over


def test_a_modules_own_attributes_go_before_those_of_the_run(tmp_path: Path) -> None:
    class Own(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.world_size, self.local_rank, self.logger = 7, 5, "mine"
            self.printed: list[str] = []

        def _log(self, text: str) -> None:
            self.printed.append(text)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self._log(f"{self.world_size} {self.local_rank} {self.global_rank} {self.logger} {self.on_gpu}")
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    module = Own()
    assert fit(tmp_path, log_every_n_steps=1).run(module, ones(1)).metrics["x"] == 1.0
    assert module.printed == ["7 5 0 mine False"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_taken_inside_a_run_belongs_to_none(tmp_path: Path, duplicate: Any) -> None:
    copies: list[Weight] = []

    class Takes(Callback):
        def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
            copies.append(duplicate(module))

    module = Weight()
    module.save_hyperparameters({"a": 1})
    fit(tmp_path, callbacks=Takes()).run(module, ones(2))
    assert [c.w.item() for c in copies] == [-1.0, -2.0]
    assert copies[0]._context is None
    assert copies[0].hparams.a == 1
    with pytest.raises(RuntimeError, match="during a Fit run"):
        copies[0].optimizers()
    fit(tmp_path).run(copies[0], ones(2))
    assert (copies[0].w.item(), module.w.item()) == (-3.0, -2.0)


def test_predict_step_is_forward_unless_defined(tmp_path: Path) -> None:
    out = fit(tmp_path).predict(Weight(3.0), [torch.ones(1, 1), torch.full((1, 1), 2.0)])
    assert [o.item() for o in out] == [3.0, 6.0]


def test_what_must_be_defined(tmp_path: Path) -> None:
    class NoStep(TrainModule):
        def configure_optimizers(self) -> Any:
            return None

    class NoOptimizer(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(TypeError, match=r"NoStep must define training_step\(self, batch, batch_idx\)"):
        fit(tmp_path).run(NoStep(), ones(1))
    with pytest.raises(TypeError, match=r"NoOptimizer must define configure_optimizers\(self\)"):
        fit(tmp_path).run(NoOptimizer(), ones(1))
    for method, step in (("validate", "validation_step"), ("test", "test_step")):
        with pytest.raises(TypeError, match=f"NoStep must define {step}"):
            getattr(fit(tmp_path), method)(NoStep(), ones(1))
    with pytest.raises(NotImplementedError, match="NoStep must define training_step"):
        NoStep().training_step(None, 0)
    with pytest.raises(NotImplementedError, match="Base must define configure_optimizers"):
        Base().configure_optimizers()
    with pytest.raises(
        TypeError, match=r"Fit takes a TrainModule, got the class Weight: give an object, Weight\(...\)"
    ):
        fit(tmp_path).run(Weight, ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Fit takes a TrainModule, got Linear"):
        fit(tmp_path).run(nn.Linear(1, 1), ones(1))  # type: ignore[arg-type]


def test_parts_built_in_configure_model_are_trained(tmp_path: Path) -> None:
    class Late(Weight):
        def configure_model(self) -> None:
            self.extra = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return ((self.w + 2 * self.extra) * batch).mean()

    module = Late()
    fit(tmp_path).run(module, ones(3))
    assert (module.w.item(), module.extra.item()) == (-3.0, -6.0)


def test_loaders_of_the_module_and_transfer_hooks(tmp_path: Path) -> None:
    class Own(Weight):
        def train_dataloader(self) -> Any:
            return ones(2)

        def val_dataloader(self) -> Any:
            return [DataLoader(torch.full((2, 1), value)) for value in (3.0, 5.0)]

        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
            return batch * 10

        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
            return batch + dataloader_idx

    module = Own()
    result = fit(tmp_path).run(module)
    assert module.w.item() == -20.0
    # Validation of w=-20 on 3 * 10 + 0 and on 5 * 10 + 1.
    assert result.metrics == {"val/dataloader_idx_0": -600.0, "val/dataloader_idx_1": -1020.0}
