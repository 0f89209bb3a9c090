"""Hooks and steps with other arguments than a run gives: called as they are defined, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor

from engine import Callback, DataModule
from engine.loop.method_arguments import argument_count


class Seen(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


class Bare(Seen):
    def setup(self) -> None:  # type: ignore[override]
        self.seen.append("setup")

    def teardown(self, *, stage: str) -> None:
        self.seen.append(stage)


class NeedsIndex(Seen):
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("start", batch_idx, dataloader_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append(("end", batch_idx))


class Watches(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(  # type: ignore[override]
        self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.seen.append((batch_idx, dataloader_idx))


def test_setup_and_teardown_without_an_argument_or_by_name(tmp_path: Path) -> None:
    module = Bare()
    fit(tmp_path).run(module, ones(1))
    assert module.seen == ["setup", "fit"]


def test_a_data_module_without_the_stage(tmp_path: Path) -> None:
    class Data(DataModule):
        def setup(self) -> None:  # type: ignore[override]
            self.data = ones(2)

        def teardown(self) -> None:  # type: ignore[override]
            self.data = []

        def train_dataloader(self) -> Any:
            return self.data

    module, data = Weight(), Data()
    fit(tmp_path).run(module, datamodule=data)
    assert (module.w.item(), data.data) == (-2.0, [])


def test_a_loaders_index_where_it_is_asked_for(tmp_path: Path) -> None:
    module, watches = NeedsIndex(), Watches()
    fit(tmp_path, callbacks=watches).validate(module, ones(2))
    assert module.seen == [("start", 0, 0), ("end", 0), ("start", 1, 0), ("end", 1)]
    assert watches.seen == [(0, 0), (1, 0)]
    module.seen.clear()
    two = [torch.utils.data.DataLoader(torch.ones(1, 1)) for _ in range(2)]
    fit(tmp_path).validate(module, two)
    assert module.seen == [("start", 0, 0), ("end", 0), ("start", 0, 1), ("end", 0)]


class OldStep(Seen):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, closure: Any) -> None:  # type: ignore[override]
        raise AssertionError


class OldEnd(Seen):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        raise AssertionError


class NoDevice(Seen):
    def transfer_batch_to_device(self, batch: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class ByName(Seen):
    def configure_gradient_clipping(self, optimizer: Any, *, gradient_clip_algorithm: Any, **kwargs: Any) -> None:
        self.seen.append((kwargs, gradient_clip_algorithm))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OldStep,
            r"OldStep.optimizer_step\(epoch, batch_idx, optimizer, optimizer_idx, closure\) cannot be called: "
            r"a run gives it \(epoch, batch_idx, optimizer, optimizer_closure\)",
        ),
        (OldEnd, r"OldEnd.on_train_batch_end\(.*a run gives it \(outputs, batch, batch_idx\)"),
        (NoDevice, r"NoDevice.transfer_batch_to_device\(.*a run gives it \(batch, device, dataloader_idx\)"),
    ],
)
def test_other_arguments_are_refused_before_the_first_step(tmp_path: Path, kind: type[Seen], message: str) -> None:
    module = kind()
    with pytest.raises(TypeError, match=message):
        fit(tmp_path).run(module, ones(1))
    assert module.losses == []


def test_clipping_is_asked_for_by_name(tmp_path: Path) -> None:
    module = ByName()
    fit(tmp_path, gradient_clip_val=0.5).run(module, ones(1))
    assert module.seen == [({"gradient_clip_val": 0.5}, "norm")]


def test_an_overridden_clip_gradients_clips(tmp_path: Path) -> None:
    class Halves(Weight):
        def clip_gradients(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            assert gradient_clip_val == 0.75
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad *= 0.5

    module = Halves()
    fit(tmp_path, gradient_clip_val=0.75).run(module, ones(2))
    assert module.w.item() == -1.0


def two(batch: Any, batch_idx: int) -> None: ...
def one(batch: Any) -> None: ...
def other_names(x: Any, i: int) -> None: ...
def third(batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
def third_needed(batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...
def any_number(*args: Any) -> None: ...


@pytest.mark.parametrize(
    ("step", "single", "several"),
    [(two, 2, 2), (one, 1, 1), (other_names, 2, 2), (third, 2, 3), (third_needed, 3, 3), (any_number, 2, 3)],
)
def test_what_a_step_takes(step: Callable[..., Any], single: int, several: int) -> None:
    assert (argument_count(step, "Net.step"), argument_count(step, "Net.step", several=True)) == (single, several)


class Alone(Weight):
    """All steps take the batch alone."""

    def training_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return (self.w * batch).mean()

    def validation_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        self.log("val", self.w.sum())

    def test_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        self.log("test", batch.sum())

    def predict_step(self, batch: Tensor) -> Any:  # type: ignore[override]
        return batch * 2


def test_steps_that_take_the_batch_alone(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, accumulate_grad_batches=2, val_every="1 epochs"), Alone()
    result = trainer.run(module, ones(4), ones(1))
    assert module.w.item() == -2.0  # two windows, each with the mean gradient 1
    assert result.metrics["val"] == -2.0
    assert trainer.test(module, ones(1))[0] == {"test": 2.0}
    assert [out.sum().item() for out in trainer.predict(module, ones(2))] == [4.0, 4.0]
    assert len(trainer.validate(module, [torch.utils.data.DataLoader(torch.ones(2, 1)) for _ in range(2)])) == 2


def test_the_steps_of_an_optimizer_with_a_closure(tmp_path: Path) -> None:
    class Closes(Alone):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    module = Closes()
    fit(tmp_path).run(module, ones(3))
    assert module.w.item() == -3.0


def test_the_number_of_a_loader_is_given_when_it_is_asked_for(tmp_path: Path) -> None:
    seen: list[int] = []

    class Numbered(Weight):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> Any:
            seen.append(dataloader_idx)

    fit(tmp_path).validate(Numbered(), ones(2))
    assert seen == [0, 0]
    seen.clear()
    fit(tmp_path).validate(Numbered(), [torch.utils.data.DataLoader(torch.ones(1, 1)) for _ in range(2)])
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda batch, batch_idx, optimizer_idx: None,
            "needs 'optimizer_idx': it gets batch, batch_idx, .*self.optimizers",
        ),
        (lambda dataloader_iter: None, "needs 'dataloader_iter'.*the run reads the loader"),
        (lambda batch, batch_idx, dataloader_idx: None, "needs 'dataloader_idx': it gets batch, batch_idx, of which"),
        (lambda: None, "takes no batch"),
        (lambda batch, *, scale: None, "needs 'scale'"),
    ],
)
def test_what_no_run_gives_is_an_error_before_the_first_step(step: Any, message: str, tmp_path: Path) -> None:
    module = Weight()
    module.training_step = step
    module.on_train_start = lambda: pytest.fail("the training began")  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=f"Weight.training_step {message}"):
        fit(tmp_path).run(module, ones(1))


def test_a_wrong_validation_step_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    class Wrong(Weight):
        def validation_step(self, batch: Tensor, batch_idx: int, hiddens: Any) -> Any: ...  # type: ignore[override]

        def on_train_start(self) -> None:
            pytest.fail("the training began")

    with pytest.raises(TypeError, match=r"Wrong.validation_step needs 'hiddens'"):
        fit(tmp_path).run(Wrong(), ones(1), ones(1))
