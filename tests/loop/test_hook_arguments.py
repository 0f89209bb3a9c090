"""Hooks with other arguments than a run gives: called as they are defined, or refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones

from engine import Callback, DataModule


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
