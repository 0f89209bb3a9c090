"""Mistakes that a training would make in silence, or would end with much later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import forget_warnings
from support.ranks import ranks_of
from support.toys import Weight, fit, ones

from callbacks import EarlyStopping, ModelCheckpoint
from engine import Callback
from engine.loop import first_checks


@pytest.fixture(autouse=True)
def _warned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees its warnings for the first time."""
    forget_warnings(monkeypatch)


# -- optimizers -----------------------------------------------------------------------------------------------------------------------


class Optimizes(Weight):
    """With an optimizer of ``tensors``."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.tensors = tensors

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean() + sum(tensor.sum() for tensor in self.tensors)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.tensors, lr=1.0)


def test_an_optimizer_of_other_parameters_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SGD has none of the parameters of Optimizes, which would not be trained"):
        fit(tmp_path, max_epochs=1).run(Optimizes(torch.nn.Parameter(torch.zeros(1))), ones(2))


def test_an_optimizer_that_has_some_of_them_trains(tmp_path: Path) -> None:
    module = Optimizes(torch.zeros(1, requires_grad=True))
    module.tensors = (*module.tensors, module.w)
    fit(tmp_path, max_epochs=1).run(module, ones(2))
    assert module.w.item() == -4.0  # two steps; w is in the loss twice


class WithoutReturn(Weight):
    """Makes an optimizer, and forgets to return it."""

    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.parameters(), lr=1.0)


def test_an_optimizer_that_is_not_returned_is_an_error(tmp_path: Path) -> None:
    message = r"WithoutReturn.configure_optimizers returned None, so nothing is trained: return the optimizer, or \[\] if that is meant"
    module = WithoutReturn()
    with pytest.raises(TypeError, match=message):
        fit(tmp_path, max_epochs=1).run(module, ones(2))
    assert not list(tmp_path.glob("**/checkpoints/*"))


@pytest.mark.parametrize("meant", ["empty list", "manual"])
def test_a_module_without_optimizers_on_purpose_is_not_reported(tmp_path: Path, meant: str) -> None:
    module = WithoutReturn()
    if meant == "empty list":
        module.configure_optimizers = list  # type: ignore[method-assign]
    else:
        module.automatic_optimization = False
    fit(tmp_path, max_epochs=1).run(module, ones(2))


def test_a_tensor_is_optimized_with_a_frozen_module(tmp_path: Path) -> None:
    """Style transfer: an image is what is trained."""
    image = torch.zeros(1, requires_grad=True)
    module = Optimizes(image)
    module.w.requires_grad_(False)
    fit(tmp_path, max_epochs=1).run(module, ones(3))
    assert image.item() == -3.0


# -- names of hooks ---------------------------------------------------------------------------------------------------------------------


class Misspells(Weight):
    def on_train_epoch_ends(self) -> None: ...

    def on_val_epoch_end(self) -> None: ...

    def val_dataloaders(self) -> Any: ...


class MisspellsToo(Callback):
    def on_train_epoch_ends(self, run: Any, module: Any) -> None: ...


def test_a_name_that_nearly_is_a_hook_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is never called") as caught:
        fit(tmp_path, max_epochs=1, callbacks=[MisspellsToo()]).run(Misspells(), ones(2))
    texts = sorted(str(warning.message).partition(";")[0] for warning in caught)
    assert texts == [
        "Misspells.on_train_epoch_ends is never called: the hook is on_train_epoch_end",
        "Misspells.on_val_epoch_end is never called: the hook is on_validation_epoch_end",
        "Misspells.val_dataloaders is never called: the hook is val_dataloader",
        "MisspellsToo.on_train_epoch_ends is never called: the hook is on_train_epoch_end",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert caught[0].lineno == Misspells.on_train_epoch_ends.__code__.co_firstlineno


class Helpers(Weight):
    """Helpers of a user, with names like those of hooks."""

    def on_train_epoch_end(self) -> None:
        self.on_train_epoch_ended()
        getattr(self, "on_train_batch_ends")()  # noqa: B009

    def on_train_epoch_ended(self) -> None: ...

    def on_train_batch_ends(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_epoch_ends(self) -> None:
        """Beside the hook itself, so that the name was chosen."""

    def on_finished(self) -> None: ...

    def on_step_end(self) -> None: ...

    def on_train_images(self) -> None: ...

    def _on_train_start(self) -> None: ...

    def test_steps(self) -> int: ...  # type: ignore[empty-body]

    def num_training_steps(self) -> int: ...  # type: ignore[empty-body]

    @property
    def train_loader(self) -> Any: ...


class HelpersToo(Helpers, Callback):
    pass


def test_helpers_are_not_reported(tmp_path: Path) -> None:
    assert first_checks.misspelled(Helpers, type(Helpers()).__mro__[2]) == {}
    fit(tmp_path, max_epochs=1).run(Helpers(), ones(2))


def test_own_classes_are_not_reported() -> None:
    import callbacks

    for name in callbacks.__all__:
        if isinstance(cls := getattr(callbacks, name), type):
            assert first_checks.misspelled(cls, Callback) == {}


# -- a loss that is not a number ------------------------------------------------------------------------------------------------------------


class Divides(Weight):
    """A loss of 0 / 0 from the batch of this number on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch).mean()
        return {"loss": loss * torch.zeros(()) / torch.zeros(()) if batch_idx >= self.first else loss}


def test_a_loss_that_is_not_a_number_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=1, log_every_n_steps=2).run(Divides(), ones(6))
    assert caplog.text.count("the loss is NaN at step 1, ") == caplog.text.count("the loss is NaN") == 1
    assert "on_nonfinite='raise'" in caplog.text


def test_it_is_reported_at_the_next_boundary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=1, log_every_n_steps=4).run(Divides(2), ones(6))
    assert "the loss is NaN at step 4, " in caplog.text


def test_a_run_that_handles_it_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=1, on_nonfinite="skip").run(Divides(), ones(4))
    assert "the loss is NaN" not in caplog.text


class Infinite(Weight):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean() + torch.tensor(float("inf"))


def test_an_infinite_loss_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_epochs=1, log_every_n_steps=1).run(Infinite(), ones(2))
    assert caplog.text.count("the loss is infinite at step 1, ") == 1


def test_the_end_of_a_run_finds_what_lies_between_log_boundaries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = fit(tmp_path, max_epochs=1, log_every_n_steps=50).run(Divides(4), ones(16))
    assert caplog.text.count("the training ends at step 16 with weights that are NaN or infinite: w.") == 1
    assert "the loss is NaN" not in caplog.text
    assert result.nonfinite == ("w",)
    assert "not finite: w" in str(result)


class ByHand(Divides):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def test_the_end_of_a_run_finds_what_manual_optimization_has_done(tmp_path: Path) -> None:
    assert fit(tmp_path, max_epochs=1, log_every_n_steps=1).run(ByHand(2), ones(4)).nonfinite == ("w",)


class Normed(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, affine=False)
        self.register_buffer("mask", torch.full((2,), -float("inf")))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * self.norm(batch)).mean()


def test_the_end_of_a_run_finds_statistics_that_a_skipped_step_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [torch.ones(2, 1), torch.full((2, 1), float("nan")), torch.ones(2, 1)]
    result = fit(tmp_path, max_epochs=1, on_nonfinite="skip").run(Normed(), batches)
    assert result.nonfinite == ("norm.running_mean", "norm.running_var")  # and not the mask
    assert result.skipped_steps == 1  # in training, batch norm does not use its statistics
    assert caplog.text.count("an optimizer step was skipped") == 1


def test_a_run_with_finite_weights_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = fit(tmp_path, max_epochs=1).run(Weight(), ones(2))
    assert (result.nonfinite, result.skipped_steps) == ((), 0)
    assert "finite" not in caplog.text
    assert "skipped_steps" not in result.metrics


# -- steps that are skipped -------------------------------------------------------------------------------------------------------------------


def test_skipped_steps_are_reported_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = NaNIn({1, 2, 5})
    result = fit(tmp_path, max_epochs=1, on_nonfinite="skip", log_every_n_steps=1, max_skipped_steps=3).run(
        module, ones(8)
    )
    assert caplog.text.count("an optimizer step was skipped") == 1
    assert "(on_nonfinite='skip'); first in: module.w. " in caplog.text
    assert (result.step, result.skipped_steps, result.metrics["skipped_steps"]) == (5, 3, 3.0)
    assert "skipped steps: 3" in str(result)
    assert module.w.item() == -5.0


class NaNIn(Weight):
    """With a loss that is NaN in some batches."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean() * (float("nan") if batch_idx in self.bad else 1.0)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_run_whose_every_step_is_skipped_ends(precision: str, tmp_path: Path) -> None:
    batches = 0

    class Endless(NaNIn):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            nonlocal batches
            batches += 1
            return super().training_step(batch, batch_idx)

    settings = {"on_nonfinite": "skip"} if precision == "32-true" else {"precision": precision}
    with pytest.raises(FloatingPointError, match=r"steps in a row were skipped \(max_skipped_steps=5\)"):
        fit(tmp_path, max_epochs=1000, max_steps=6, max_skipped_steps=5, **settings).run(Endless({*range(4)}), ones(4))
    # fp16 begins at a scale of 2 ** 16, which the sixteenth skipped step lowers to 1.
    assert batches == (5 if precision == "32-true" else 16)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    settings = {"on_nonfinite": "skip", "callbacks": ModelCheckpoint(every="1 epochs")}
    assert fit(tmp_path, max_epochs=1, **settings).run(NaNIn({0}), ones(2)).skipped_steps == 1
    assert fit(tmp_path, max_epochs=2, **settings).run(NaNIn({0}), ones(2), resume="last").skipped_steps == 2


# -- a stream that never ends -----------------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4, 2, 1))


@pytest.mark.parametrize(
    "limits", [{}, {"max_epochs": 3}, {"max_steps": 2}, {"max_time": "1 s"}, {"limit_train_batches": 2}]
)
def test_a_stream_without_a_limit_is_reported(
    tmp_path: Path, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_checks, "ENDLESS_S", 0.0)
    fit(tmp_path, log_every_n_steps=1, **limits).run(Weight(), torch.utils.data.DataLoader(Stream(), batch_size=None))
    expected = int(set(limits) <= {"max_epochs"})
    assert caplog.text.count("no epoch has ended after") == expected
    only = f"the training data (DataLoader) has no length, and only max_epochs={limits.get('max_epochs', 1)} ends this training"
    assert caplog.text.count(only) == expected


# -- monitors -----------------------------------------------------------------------------------------------------------------------------------


class Logs(Weight):
    """Logs "loss" in training, and "val" in validation."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class Plateau(Logs):
    """With a scheduler that follows what ``followed`` names."""

    def __init__(self, followed: str, strict: bool = True) -> None:
        super().__init__()
        self.followed, self.strict = followed, strict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self.followed, "strict": self.strict},
        }


STOPPING = {"patience": 3, "check_finite": False}


@pytest.mark.parametrize(
    "callback",
    [EarlyStopping(monitor="vall", **STOPPING), ModelCheckpoint(monitor="vall")],
    ids=["early stopping", "checkpoint"],
)
def test_a_metric_that_nobody_logs_ends_the_run_after_its_first_step(tmp_path: Path, callback: Callback) -> None:
    module = Logs()
    with pytest.raises(
        ValueError, match=r"neither validation nor training_step logs 'vall'; did you mean 'val'\?; logged: loss, .*val"
    ):
        fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, callbacks=[callback]).run(module, ones(5), ones(2))
    assert len(module.losses) == 1


@pytest.mark.parametrize("val_every", [None, "1 epochs"])
def test_a_plateau_of_a_metric_that_never_comes(tmp_path: Path, val_every: str | None) -> None:
    module = Plateau("val_loss")
    wanted = "and this training has no validation" if val_every is None else "did you mean"
    with pytest.raises(ValueError, match=f"ReduceLROnPlateau with monitor 'val_loss'.*{wanted}"):
        fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, val_every=val_every).run(module, ones(5), ones(2))
    assert len(module.losses) == 1


class AtEpochsEnd(Logs):
    def on_train_epoch_end(self) -> None:
        self.log("".join(["la", "te"]), 1.0)


class Sometimes(Logs):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.log("late", 1.0)
        return super().training_step(batch, batch_idx)


LATE = "late"


class SometimesByConstant(Logs):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.log(LATE, 1.0)
        return super().training_step(batch, batch_idx)


class NotInTheCheck(Logs):
    def on_validation_epoch_end(self) -> None:
        if self.run.stage != "sanity":
            self.log_dict({"".join(["la", "te"]): 1.0})


class Adds(Callback):
    def on_before_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        if step > 2:
            metrics["".join(["la", "te"])] = 1.0


@pytest.mark.parametrize("late", [AtEpochsEnd, Sometimes, SometimesByConstant, NotInTheCheck, Adds])
def test_what_may_come_later_is_waited_for(tmp_path: Path, late: type) -> None:
    module, added = (Logs(), [Adds()]) if late is Adds else (late(), [])
    plateau = EarlyStopping(monitor="late", **STOPPING) if late is not AtEpochsEnd else ModelCheckpoint(monitor="late")
    every = {"val_every": None} if late is AtEpochsEnd else {}
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, log_every_n_steps=1, callbacks=[plateau, *added], **every).run(
        module, ones(5), ones(2)
    )
    assert len(module.losses) == 5


class SometimesPutTogether(Logs):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.log_dict({f"train/{name}": 1.0 for name in ["".join(["la", "te"])]})
        return super().training_step(batch, batch_idx)


def test_a_name_that_is_put_together_is_waited_for(tmp_path: Path) -> None:
    module, plateau = SometimesPutTogether(), EarlyStopping(monitor="train/late", **STOPPING)
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, log_every_n_steps=1, callbacks=[plateau]).run(
        module, ones(5), ones(2)
    )
    assert len(module.losses) == 5


class OneStepForAll(Logs):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def shared_step(self, batch: torch.Tensor, stage: str) -> Any:
        loss = super().training_step(batch, 0)
        self.log(f"{stage}/loss", loss)
        return loss


@pytest.mark.parametrize(("monitor", "every"), [("val/los", {}), ("val/loss", {"val_every": None})])
def test_a_name_that_is_put_together_in_every_step_is_known(tmp_path: Path, monitor: str, every: Any) -> None:
    module, plateau = OneStepForAll(), EarlyStopping(monitor=monitor, **STOPPING)
    with pytest.raises(ValueError, match=f"neither validation nor training_step logs '{monitor}'"):
        fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, callbacks=[plateau], **every).run(module, ones(5), ones(2))
    assert module.global_step == 1


@pytest.mark.parametrize("followed", ["loss", "val"])
def test_a_metric_of_training_or_of_validation_is_known(tmp_path: Path, followed: str) -> None:
    module = Plateau(followed)
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, callbacks=[ModelCheckpoint(monitor="val")]).run(
        module, ones(5), ones(2)
    )
    assert len(module.losses) == 5


class Twice(Logs):
    """Trains with the step of the validation."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.validation_step(batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("val", 1.0, on_step=False, on_epoch=True)


class InValidation(Logs):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("val", 1.0)


@pytest.mark.parametrize(
    "callback", [EarlyStopping(monitor="val"), ModelCheckpoint(monitor="val")], ids=["early stopping", "checkpoint"]
)
def test_a_metric_of_a_validation_that_never_comes(tmp_path: Path, callback: Callback) -> None:
    module = InValidation()
    with pytest.raises(
        ValueError, match=r"logs 'val'; logged: loss, .*and this training has no validation \(no data was given"
    ):
        fit(tmp_path, max_epochs=1, callbacks=[callback]).run(module, ones(5))
    assert len(module.losses) == 1


def test_a_validation_step_that_training_calls_is_waited_for(tmp_path: Path) -> None:
    module = Twice()
    fit(tmp_path, max_epochs=1, callbacks=[EarlyStopping(monitor="val")]).run(module, ones(5))
    assert len(module.losses) == 5


@pytest.mark.parametrize(
    "callback", [EarlyStopping(monitor="late"), ModelCheckpoint(monitor="late")], ids=["early stopping", "checkpoint"]
)
def test_the_late_error_says_that_there_is_no_validation(tmp_path: Path, callback: Callback) -> None:
    class Late(Logs):
        def on_train_epoch_start(self) -> None:
            self.name = "late"  # which may be logged

    with pytest.raises(
        ValueError, match=r"log it with self.log\('late', value\) in training_step: this run has no validation"
    ):
        fit(tmp_path, max_epochs=1, callbacks=[callback]).run(Late(), ones(2))


def test_nothing_is_refused_without_a_sanity_check(tmp_path: Path) -> None:
    module = Logs()
    with pytest.raises(ValueError, match="this metric was not logged"):
        fit(tmp_path, max_epochs=1, callbacks=[EarlyStopping(monitor="vall")]).run(module, ones(5), ones(2))
    assert len(module.losses) == 5


def test_a_metric_that_may_be_missing(tmp_path: Path) -> None:
    module = Plateau("vall", strict=False)
    fit(tmp_path, max_epochs=1, num_sanity_val_steps=1, callbacks=[EarlyStopping(monitor="vall", strict=False)]).run(
        module, ones(5), ones(2)
    )
    assert len(module.losses) == 5


def follow(folder: str) -> str:
    try:
        fit(
            folder,
            devices="auto",
            strategy="ddp",
            max_epochs=1,
            num_sanity_val_steps=1,
            callbacks=[EarlyStopping(monitor="vall")],
        ).run(
            Logs(),
            torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=1),
            torch.utils.data.DataLoader(torch.ones(8, 1)),
        )
    except ValueError as error:
        return str(error).partition(" logs ")[0]
    return ""


def test_all_ranks_find_the_metric_missing(tmp_path: Path) -> None:
    assert ranks_of(follow, 2, tmp_path) == ["EarlyStopping(monitor='vall'): neither validation nor training_step"] * 2
