"""What a module, its callbacks and its data module do when a checkpoint is loaded: in every path, in one order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import LINEAR_BATCHES, Weight, fit, ones
from torch import Tensor, nn

from callbacks import EMA, SWA, ModelCheckpoint, WeightAveraging
from engine import Callback, DataModule, Resume, TrainModule


class Threshold(Weight):
    """Saves a threshold, 1.0 at first and one more after each epoch, beside the weights; ``seen`` is that of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold, self.seen = 1.0, 0.0
        self.events: list[tuple[str, float]] = []

    def on_train_epoch_end(self) -> None:
        self.threshold += 1

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("best_at_two", abs(self.w.item() + 2))
        self.seen = self.threshold

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen = self.threshold

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self.threshold
        return batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["threshold"] = self.threshold

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.events.append(("before", self.w.item()))
        self.threshold = checkpoint["threshold"]

    def on_checkpoint_loaded(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["threshold"] == self.threshold
        self.events.append(("after", self.w.item()))


class Numbers(DataModule):
    """Data with a state: the mean of what it has seen."""

    mean = 0.0

    def train_dataloader(self) -> Any:
        return ones(1)

    def val_dataloader(self) -> Any:
        self.mean_of_loader = self.mean
        return ones(1)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"mean": 5.0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean = state_dict["mean"]


def trained(root: Path, module: TrainModule, *callbacks: Any, **settings: Any) -> Any:
    """Four epochs of one step, the weight -1 after each; the second checkpoint is the best."""
    saves = ModelCheckpoint(every="1 epochs", monitor="best_at_two", mode="min", save_top_k=-1)
    return fit(root, max_epochs=4, callbacks=[*callbacks, saves], **settings).run(module, datamodule=Numbers())


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluations_get_what_was_saved_beside_the_weights(tmp_path: Path, name: str) -> None:
    result = trained(tmp_path, Threshold())
    module, data = Threshold(), Numbers()
    getattr(fit(tmp_path), name)(module, datamodule=data, checkpoint=result.last_checkpoint)
    assert (module.seen, module.w.item()) == (5.0, -4.0)
    assert module.events == [("before", 0.0), ("after", -4.0)]
    assert (data.mean, data.mean_of_loader) == (5.0, 5.0)
    getattr(fit(tmp_path), name)(module, datamodule=data, checkpoint="best")
    assert (module.seen, module.w.item()) == (3.0, -2.0)


def test_the_best_checkpoint_that_is_reloaded_brings_its_own(tmp_path: Path) -> None:
    module = Threshold()
    trained(tmp_path, module, reload_best=True)
    assert (module.threshold, module.w.item()) == (3.0, -2.0)
    assert module.events == [("before", -4.0), ("after", -2.0)]


def test_a_new_run_from_weights_gets_what_was_saved_beside_them(tmp_path: Path) -> None:
    result = trained(tmp_path, Threshold())
    module, data = Threshold(), Numbers()
    resume = Resume(result.last_checkpoint, weights_only=True)
    run = fit(tmp_path, max_epochs=1).run(module, datamodule=data, resume=resume)
    assert (run.step, module.threshold, module.w.item(), data.mean) == (1, 6.0, -5.0, 5.0)
    assert module.events == [("before", 0.0), ("after", -4.0)]


def test_a_resume_and_load_from_checkpoint_have_the_same_order(tmp_path: Path) -> None:
    result = trained(tmp_path, Threshold())
    module = Threshold()
    fit(tmp_path, max_epochs=5).run(module, datamodule=Numbers(), resume="last")
    assert module.events == [("before", 0.0), ("after", -4.0)]
    assert Threshold.load_from_checkpoint(result.last_checkpoint).events == [("before", 0.0), ("after", -4.0)]


def test_the_state_of_another_data_module_is_not_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Others(Numbers):
        pass

    result, data = trained(tmp_path, Threshold()), Others()
    fit(tmp_path).test(Threshold(), datamodule=data, checkpoint=result.last_checkpoint)
    assert data.mean == 0.0
    assert "has the state of the data module Numbers, and this one is" in caplog.text


class Layers(TrainModule):
    """Builds its head when it knows from the data, or from a checkpoint, how many classes there are."""

    def __init__(self, classes: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        if classes is not None:
            self.head = nn.Linear(4, classes)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(batch))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("out", self(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["classes"] = self.head.out_features

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.head = nn.Linear(4, checkpoint["classes"])


def test_layers_that_are_built_when_a_checkpoint_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, resumed = Layers(3), Layers()
    fit(tmp_path / "whole", max_epochs=2).run(whole, LINEAR_BATCHES)
    result = fit(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint()]).run(Layers(3), LINEAR_BATCHES)
    fit(tmp_path, max_epochs=2).run(resumed, LINEAR_BATCHES, resume="last")
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    fit(tmp_path).test(Layers(), LINEAR_BATCHES, checkpoint=result.last_checkpoint)
    fit(tmp_path).run(Layers(), LINEAR_BATCHES, resume=Resume(result.last_checkpoint, weights_only=True))
    assert "overwrite" not in caplog.text


def test_a_module_adds_parameter_groups_again(tmp_path: Path) -> None:
    class Grows(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(torch.zeros(1), requires_grad=False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.late.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w], lr=1.0)

        def add(self) -> None:
            self.late.requires_grad_(True)
            self.optimizers().add_param_group({"params": [self.late], "lr": 0.5})

        def on_train_epoch_start(self) -> None:
            if self.run.epoch == 1 and len(self.optimizers().param_groups) == 1:
                self.add()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.run.epoch >= 1:
                self.add()

    module = Grows()
    fit(tmp_path, max_epochs=2, callbacks=[ModelCheckpoint()]).run(Grows(), ones(2))
    fit(tmp_path, max_epochs=3).run(module, ones(2), resume="last")
    assert (module.w.item(), module.late.item()) == (-6.0, -2.0)


class Buffers(TrainModule):
    """A weight that is trained, and buffers; hooks set what ``early`` and ``late`` say."""

    def __init__(self, early: Callable[[Any], None] | None = None, late: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late = early, late
        self.net = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(3))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean() * self.scale[0]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.scale.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.early is not None:
            self.early(self)

    def on_checkpoint_loaded(self, checkpoint: dict[str, Any]) -> None:
        if self.late is not None:
            self.late(self)


def seven(module: Any) -> None:
    module.scale.data[:2] = 7


@pytest.mark.parametrize(
    "averages", [lambda: EMA(0.9), lambda: SWA(swa_epoch_start=1), WeightAveraging], ids=["EMA", "SWA", "mean"]
)
def test_averages_see_what_a_hook_changes(tmp_path: Path, averages: Callable[[], Callback]) -> None:
    def resumed(name: str, callbacks: list[Callback]) -> tuple[list[float], list[list[float]], Any]:
        root, module = tmp_path / name, Buffers(late=seven)
        settings: dict[str, Any] = {"val_every": "1 epochs"}
        fit(root, max_epochs=2, callbacks=[*callbacks, ModelCheckpoint()], **settings).run(
            Buffers(), LINEAR_BATCHES, LINEAR_BATCHES[:1]
        )
        again = [averages()] if callbacks else []
        fit(root, max_epochs=4, callbacks=again, **settings).run(
            module, LINEAR_BATCHES, LINEAR_BATCHES[:1], resume="last"
        )
        return module.scale.tolist(), module.seen, module.net.weight.detach()

    (scale, seen, weight), (average_scale, average_seen, average) = resumed("a", []), resumed("b", [averages()])
    assert scale == average_scale == [7, 7, 1]
    assert seen == average_seen == [[7, 7, 1]] * 2
    assert not torch.equal(weight, average)


def test_a_value_that_weights_overwrite_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = fit(tmp_path, callbacks=[ModelCheckpoint()]).run(Buffers(), LINEAR_BATCHES)
    text = "on_load_checkpoint sets scale, and the checkpoint's weights, which are loaded after it, overwrite that"
    paths: list[Callable[[TrainModule], Any]] = [
        lambda module: fit(tmp_path).validate(module, LINEAR_BATCHES, checkpoint=result.last_checkpoint),
        lambda module: fit(tmp_path, max_epochs=2).run(module, LINEAR_BATCHES, resume=result.last_checkpoint),
    ]
    for path in paths:
        module = Buffers(early=seven)
        caplog.clear()
        path(module)
        assert module.scale.tolist() == [1, 1, 1]
        assert text in caplog.text
        assert "on_checkpoint_loaded" in caplog.text
    caplog.clear()
    fit(tmp_path).validate(Buffers(late=seven), LINEAR_BATCHES, checkpoint=result.last_checkpoint)
    assert "overwrite" not in caplog.text


def test_callbacks_are_called_before_the_weights_and_after_them(tmp_path: Path) -> None:
    class Sees(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int, int]] = []

        def on_load_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.seen.append(("before", module.w.item(), run.step, len(run.optimizers)))

        def on_checkpoint_loaded(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.seen.append(("after", module.w.item(), run.step, checkpoint["global_step"]))

    trained(tmp_path, Threshold())
    sees = Sees()
    fit(tmp_path, max_epochs=5, callbacks=[sees]).run(Threshold(), datamodule=Numbers(), resume="last")
    assert sees.seen == [("before", 0.0, 4, 1), ("after", -4.0, 4, 4)]
