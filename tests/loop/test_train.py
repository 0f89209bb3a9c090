"""The loops: the order of events, the way to ``training_step``, and what it may return."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint
from engine import Callback, Fit, Loss

MOST_FRAMES = 6


class Writes(Weight):
    """Its steps and ``configure_*`` write their names down."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def configure_model(self) -> None:
        self.seen.append("configure_model")

    def configure_optimizers(self) -> Any:
        self.seen.append("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: self.seen.append(f"scheduler {n}") or 1.0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append("training_step")
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen.append("validation_step")
        self.log("val", 1.0)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.seen.append("test_step")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.append("predict_step")


def all_events(seen: list[str]) -> Callback:
    callback = Callback()
    for name in vars(Callback):
        if name.startswith("on_") or name in ("setup", "teardown"):
            setattr(callback, name, lambda *args, name=name: seen.append(name))
    return callback


def evaluation(name: str) -> list[str]:
    return [
        f"on_{name}_start",
        f"on_{name}_epoch_start",
        f"on_{name}_batch_start",
        f"{name}_step",
        f"on_{name}_batch_end",
        f"on_{name}_epoch_end",
    ]


def test_the_order_of_all_events_of_a_training(tmp_path: Path) -> None:
    seen: list[str] = []
    settings = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1, "max_epochs": 1}
    fit(tmp_path, callbacks=all_events(seen), **settings).run(Writes(seen), ones(3), ones(1))
    micro = ["on_train_batch_start", "training_step", "on_before_backward", "on_after_backward"]
    step = ["on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"]
    log = ["on_before_log", "on_log"]
    assert seen == [
        *("setup", "configure_model", "configure_optimizers", "scheduler 0", "on_fit_start"),
        *("on_sanity_check_start", *evaluation("validation"), "on_validation_end", "on_sanity_check_end"),
        *("on_train_start", "on_train_epoch_start"),
        *(*micro, "on_train_batch_end"),
        *(*micro, *step, *log),
        *(*micro, *step, *log),
        *(*evaluation("validation"), *log, "on_validation_end"),
        *("on_train_epoch_end", "on_before_log", "scheduler 1"),
        *("on_train_end", "on_fit_end", "teardown"),
    ]


@pytest.mark.parametrize(("method", "name"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_order_of_the_others(tmp_path: Path, method: str, name: str) -> None:
    seen: list[str] = []
    getattr(fit(tmp_path, callbacks=all_events(seen)), method)(Writes(seen), ones(1))
    seen = [event for event in seen if event not in ("on_before_log", "on_log")]
    assert seen == ["setup", "configure_model", *evaluation(name), f"on_{name}_end", "teardown"]


class Deep(Weight):
    """Counts the frames between ``Fit.run`` and its training step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        frame, self.frames = sys._getframe(1), 0
        while frame.f_code is not Fit.run.__code__:
            frame, self.frames = frame.f_back, self.frames + 1  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


def ranks_frames(root: str) -> int:
    module = Deep()
    fit(root, devices="auto").run(module, ones(4))
    return module.frames


def test_few_frames_lie_between_run_and_training_step(tmp_path: Path) -> None:
    module = Deep()
    fit(tmp_path).run(module, ones(1))
    assert module.frames <= MOST_FRAMES


def test_ddp_adds_torchs_frames_and_one_of_ours(tmp_path: Path) -> None:
    # Module.__call__ and forward of DistributedDataParallel and of the module inside, what DDP does between them, and Replica.forward.
    assert max(ranks_of(ranks_frames, 2, tmp_path)) <= MOST_FRAMES + 7


class Returns(Weight):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.make((self.w * batch).mean(), batch_idx)


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda loss, i: loss, -3.0),
        (lambda loss, i: {"loss": loss, "more": "x"}, -3.0),
        (lambda loss, i: Loss(loss * 4, 2), -6.0),
        (lambda loss, i: {"loss": Loss(loss * 4, 2)}, -6.0),
        (lambda loss, i: loss.reshape(1), -3.0),
        (lambda loss, i: None if i == 1 else loss, -2.0),
        (lambda loss, i: {"loss": None} if i == 1 else loss, -2.0),
    ],
)
def test_what_training_step_may_return(tmp_path: Path, make: Any, weight: float) -> None:
    module = Returns(make)
    result = fit(tmp_path).run(module, ones(3))
    assert module.w.item() == weight
    assert result.step == (2 if weight == -2.0 else 3)


def test_a_forgotten_return_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.utils.log._said", set())
    module = Returns(lambda loss, i: None)
    with (
        pytest.warns(
            UserWarning, match=r"Returns.training_step returned None for every batch so far: nothing is trained"
        ) as told,
        pytest.raises(ValueError, match=r"Returns.training_step returned None for every batch \(3 windows\)"),
    ):
        fit(tmp_path).run(module, ones(3))
    assert len(told) == 1
    assert module.w.item() == 0.0


@pytest.mark.parametrize("loader", [[None, None], [torch.zeros(0, 1)] * 2])
def test_a_loader_that_leaves_out_all_samples_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Any
) -> None:
    monkeypatch.setattr("engine.utils.log._said", set())

    class Filters(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with (
        pytest.warns(UserWarning, match="every batch so far is None or without samples"),
        pytest.raises(ValueError, match=r"every batch \(2 windows\) was None or without samples.*collate function"),
    ):
        fit(tmp_path).run(Filters(), loader)


@pytest.mark.filterwarnings("ignore:.*returned None for every batch so far")
@pytest.mark.parametrize(("steps", "windows"), [(6, 20), (30, 30)])
def test_a_forgotten_return_ends_a_training_that_only_steps_limit(
    steps: int, windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loop.steps.MOST_WITHOUT_LOSS", 20)
    with pytest.raises(ValueError, match=rf"returned None for every batch \({windows} windows\)"):
        fit(tmp_path, max_epochs=None, max_steps=steps).run(Returns(lambda loss, i: None), ones(3))


@pytest.mark.filterwarnings("ignore:.*returned None for every batch so far")
def test_a_training_may_begin_with_batches_that_it_leaves_out(tmp_path: Path) -> None:
    seen = iter(range(100))
    module = Returns(lambda loss, i: None if next(seen) < 4 else loss)
    assert fit(tmp_path, max_epochs=2).run(module, ones(3)).step == 2
    assert module.w.item() == -2.0


@pytest.mark.filterwarnings("ignore:.*returned None for every batch so far")
def test_a_resumed_training_without_any_loss_is_an_error(tmp_path: Path) -> None:
    result = fit(tmp_path, max_epochs=1, callbacks=ModelCheckpoint(every="1 epochs")).run(
        Returns(lambda loss, i: loss), ones(3)
    )
    assert result.step == 3
    with pytest.raises(ValueError, match="returned None for every batch"):
        fit(tmp_path, max_epochs=2).run(Returns(lambda loss, i: None), ones(3), resume="last")


def test_manual_optimization_that_never_steps_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Returns(lambda loss, i: None)
    module.automatic_optimization = False
    assert fit(tmp_path).run(module, ones(3)).step == 0
    assert caplog.text.count("has not called step() of any optimizer: nothing was trained") == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda loss, i: 1.0,
            TypeError,
            r"Returns.training_step returned float; possible: a scalar tensor, Loss\(sum, count\), a dict",
        ),
        (lambda loss, i: {"los": loss}, ValueError, "a dict without 'loss'; its keys: los"),
        (lambda loss, i: torch.stack([loss, loss]), ValueError, r"one element, got shape \(2,\)"),
        (lambda loss, i: {"loss": 3}, TypeError, "a loss must be a scalar tensor or Loss"),
    ],
)
def test_what_it_may_not(tmp_path: Path, make: Any, error: type[Exception], message: str) -> None:
    module = Returns(make)
    with pytest.raises(error, match=message):
        fit(tmp_path).run(module, ones(3))
    assert module.w.item() == 0.0


def test_minus_one_at_a_batch_start_ends_the_epoch(tmp_path: Path) -> None:
    class Skips(Weight):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    module = Skips()
    result = fit(tmp_path, max_epochs=2).run(module, ones(5))
    assert (module.w.item(), result.step, result.epoch) == (-7.0, 7, 2)


def test_validation_runs_when_it_is_due(tmp_path: Path) -> None:
    class Notes(Weight):
        def on_validation_start(self) -> None:
            seen.append((self.current_epoch, self.global_step))

    for every, expected in (
        ("1 epochs", [(0, 4), (1, 8)]),
        ("2 epochs", [(1, 8)]),
        (3, [(0, 3), (1, 6)]),
        (0.5, [(0, 2), (0, 4), (1, 6), (1, 8)]),
        (None, []),
    ):
        seen: list[tuple[int, int]] = []
        fit(tmp_path, max_epochs=2, val_every=every).run(Notes(), ones(4), ones(1))
        assert seen == expected, every


def test_several_loaders_get_their_index_and_their_names(tmp_path: Path) -> None:
    class Two(Weight):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> Any:
            seen.append((batch_idx, dataloader_idx))
            self.log("mean", batch.mean())

        def on_validation_epoch_end(self) -> None:
            self.log("both", 7.0)

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            ends.append((batch_idx, dataloader_idx))

    seen: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    loaders = [DataLoader(torch.tensor([1.0, 2.0, 6.0]), batch_size=2), DataLoader(torch.tensor([5.0]))]
    found = fit(tmp_path).validate(Two(), loaders)
    assert seen == ends == [(0, 0), (1, 0), (0, 1)]
    assert found == [{"mean/dataloader_idx_0": 3.0, "both": 7.0}, {"mean/dataloader_idx_1": 5.0, "both": 7.0}]


def test_evaluation_leaves_the_flags_of_every_submodule_also_after_an_error(tmp_path: Path) -> None:
    class Fails(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.live = nn.Dropout(), nn.Dropout()
            self.frozen.eval()

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            assert not any(m.training for m in self.modules())
            assert not torch.is_grad_enabled()
            if batch_idx:
                raise OSError

    module = Fails()
    for batches in (1, 2):
        try:
            fit(tmp_path).validate(module, ones(batches))
        except OSError:
            assert batches == 2
        assert (module.training, module.frozen.training, module.live.training) == (True, False, True)


class Shares(Weight):
    """Writes down the share of the window: its samples and whether it is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, bool]] = []

    def note(self, event: str) -> None:
        share = self.run.engine.window.share
        self.seen.append((event, share.size, share.last))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.note("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation")

    def on_validation_end(self) -> None:
        self.note("validated")

    def on_train_epoch_end(self) -> None:
        self.note("epoch")


def test_a_validation_inside_an_epoch_leaves_the_share_of_the_training_alone(tmp_path: Path) -> None:
    """A stop in the middle of an epoch ends the latest micro-batch, too: in hooks after it the window has no share of the data."""
    module = Shares()
    data, validation = (DataLoader(torch.ones(n, 1), batch_size=n // 3) for n in (6, 9))
    run = fit(tmp_path, max_steps=1, accumulate_grad_batches=2, val_every="1 steps", num_sanity_val_steps=0)
    run.run(module, data, validation)
    training = [("training", 2, False), ("training", 2, True)]
    assert module.seen == [*training, *[("validation", 3, True)] * 3, ("validated", 2, True), ("epoch", -1, True)]
