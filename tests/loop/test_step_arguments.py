"""Steps without ``batch_idx`` and ``dataloader_idx``, and steps that ask for what a run does not give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch import Tensor

from engine.loop.step_arguments import taken


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
    assert (taken(step, "Net.step"), taken(step, "Net.step", several=True)) == (single, several)


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
