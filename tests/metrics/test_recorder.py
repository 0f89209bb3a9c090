"""Logged values: names, weights, reductions over micro-batches and ranks, torchmetrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from support.internals import new_recorder
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor
from torch.utils.data import DataLoader

from engine import Callback, Loss

# Seven samples, classes and predictions: 5 of 7 are right.
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0])
GUESSES = torch.tensor([0, 1, 2, 1, 1, 0, 0])


def test_means_are_weighted_by_the_samples() -> None:
    r = new_recorder()
    for size, value in ((3, 1.0), (17, 2.0), (1, 30.0)):
        r.size = size
        r.record("plain", value)
        r.record("tensor", torch.tensor([value]))
        r.record("mine", value, batch_size=2)
        r.record("tokens", torch.tensor(value), batch_size=torch.tensor(size))
    assert r.epoch_values() == {"plain": 67 / 21, "tensor": 67 / 21, "mine": 11.0, "tokens": 67 / 21}


def test_a_loss_weighs_by_its_count() -> None:
    r = new_recorder()
    w = torch.ones((), requires_grad=True)
    counts = []
    for size, total, count in ((8, 6.0, 3), (8, 40.0, 20), (2, 0.0, 0)):
        r.size = size
        counts.append(torch.tensor(count))
        r.record("loss", Loss(w * total, counts[-1]))
        r.record("float", Loss(w * total, float(count)))
        counts[-1].zero_()  # what was logged is a copy
    assert r.epoch_values() == {"loss": 2.0, "float": 2.0}


def test_a_loss_has_no_other_weight_and_no_other_reduction() -> None:
    loss = Loss(torch.ones(()), 2)
    with pytest.raises(ValueError, match=r"log\('loss', batch_size=4\) got a Loss.*weighs by its count"):
        new_recorder().record("loss", loss, batch_size=4)
    with pytest.raises(ValueError, match=r"log\('loss', reduce_fx='sum'\) got a Loss"):
        new_recorder().record("loss", loss, reduce="sum")


class Tokens(Weight):
    """A batch is a row of tokens, of which zeros do not count."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = Loss((self.w * batch).sum(), (batch != 0).sum())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"also": loss})
        return loss

    validation_step = training_step


def test_the_logged_loss_is_the_one_that_is_minimized(tmp_path: Path) -> None:
    batches = [torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[2.0, 3.0, 4.0]]), torch.tensor([[5.0, 5.0, 0.0]])]
    rows: list[dict[str, float]] = []

    class Rows(Callback):
        def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
            rows.append(dict(metrics))

    module = Tokens(start=1.0)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    run = fit(tmp_path, max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1, callbacks=[Rows()])
    result = run.run(module, DataLoader(batches, batch_size=None))
    assert [row["loss_step"] for row in rows if "loss_step" in row] == [10 / 4, 5.0]
    assert result.metrics["loss_epoch"] == pytest.approx(20 / 6, rel=1e-6)
    assert [row["also"] for row in rows if "also" in row] == [10 / 4, 5.0]


def test_other_reductions_are_not_weighted() -> None:
    r = new_recorder()
    for size, value in ((3, 4.0), (17, -2.0), (1, 1.0)):
        r.size = size
        for reduce in ("sum", "min", "max"):
            r.record(reduce, value, reduce=reduce)
            r.record(f"tensor {reduce}", torch.tensor(value), reduce=reduce)
    expected = {"sum": 3.0, "min": -2.0, "max": 4.0}
    assert r.epoch_values() == {**expected, **{f"tensor {k}": v for k, v in expected.items()}}


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("tensors", [False, True])
def test_many_values_are_folded_without_a_change(reduce: str, tensors: bool) -> None:
    r = new_recorder()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(700, generator=generator, dtype=torch.float64).tolist()
    weights = torch.randint(1, 9, (700,), generator=generator).tolist()
    for value, weight in zip(values, weights, strict=True):
        r.size = weight
        r.record("a", torch.tensor(value, dtype=torch.float64) if tensors else value, reduce=reduce)
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    expected = {"mean": mean, "sum": sum(values), "min": min(values), "max": max(values)}[reduce]
    assert r.epoch_values()["a"] == pytest.approx(expected, rel=1e-12)


def test_a_mean_of_fp16_and_fp32_values_is_made_in_fp64() -> None:
    r = new_recorder()
    for _ in range(4096):
        r.record("half", torch.tensor(1.0, dtype=torch.float16))  # an fp16 sum would stop at 2048
        r.record("single", torch.tensor(1.0 + 2**-23))
    values = r.epoch_values()
    assert (values["half"], values["single"]) == (1.0, 1.0 + 2**-23)


def test_names_of_step_and_epoch_values() -> None:
    r = new_recorder(on_step=True, on_epoch=False)
    for window, value in enumerate((1.0, 2.0)):
        r.window = window
        r.record("step", value)
        r.record("epoch", value, on_step=False, on_epoch=True)
        r.record("both", value, on_epoch=True)
        r.record("none", value, on_step=False)
    assert r.step_values() == {"step": 2.0, "both_step": 2.0}
    assert r.epoch_values() == {"epoch": 1.5, "both_epoch": 1.5}
    assert r.epoch_values() == {}  # a new epoch


def test_a_step_value_is_that_of_all_micro_batches_of_the_newest_step_only() -> None:
    r = new_recorder(on_step=True, on_epoch=False)
    for window, size, value in ((0, 1, 50.0), (1, 1, 1.0), (1, 3, 5.0)):
        r.window, r.size = window, size
        r.record("a", value)
        if window == 0:
            r.record("old", value)
    assert r.step_values() == {"a": 4.0}


def test_nothing_is_kept_of_a_repeated_micro_batch() -> None:
    r = new_recorder()
    r.size = 0
    r.record("a", 5.0)
    assert r.epoch_values() == {}


def test_a_logged_tensor_keeps_no_graph() -> None:
    r = new_recorder()
    w = torch.ones(1, requires_grad=True)
    r.record("a", w * 2)
    r.record("a", (w * 2).sum())
    assert [value.requires_grad for value, _ in r.slots["a"].values] == [False, False]


def test_a_part_of_something_keeps_its_value_and_nothing_else() -> None:
    """An element of a large activation would keep all of it until the log boundary; a parameter would show its value after the step."""
    values, found = new_recorder(on_step=True), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    single, scale, buffer = torch.nn.Parameter(torch.tensor(4.0)), torch.full((1,), 5.0), torch.tensor(7.0)
    parts = {"a": found[1], "b": found.detach()[2:], "c": single, "d": scale, "e": found.sum(), "f": buffer}
    for name, value in parts.items():
        values.record(name, value)
    kept = [slot.window_values[0][0] for slot in values.slots.values()]
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [4] * 6
    with torch.no_grad():
        for tensor in (found, single, scale, buffer):
            tensor.zero_()
    assert values.step_values() == {f"{name}_step": number for name, number in zip("abcdef", range(2, 8), strict=True)}


@pytest.mark.parametrize("on_step", [True, False])
def test_a_loss_that_changes_in_place_after_it_was_logged_is_refused(on_step: bool) -> None:
    values, weight = new_recorder(on_step=on_step), torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    values.record("loss", loss)
    loss += 1
    with pytest.raises(ValueError, match=r"log\('loss'\) got a tensor that was changed in place afterwards"):
        values.step_values() if on_step else values.epoch_values()


def test_a_loss_that_changed_in_place_before_it_was_logged_keeps_its_value() -> None:
    values, weight = new_recorder(), torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    loss += 1
    values.record("before", loss)
    loss += 1
    with torch.inference_mode():
        values.record("inference", torch.tensor(5.0))
    assert values.epoch_values() == {"before": 3.0, "inference": 5.0}


def test_numbers_in_disguise() -> None:
    r = new_recorder()
    r.record("numpy", numpy.float32(2.0))
    r.record("array", numpy.array(3.0))
    r.record("bool", True)
    assert r.epoch_values() == {"numpy": 2.0, "array": 3.0, "bool": 1.0}


def test_infinite_values_are_shown() -> None:
    r = new_recorder()
    for value in (float("inf"), 1.0):
        r.record("inf", value)
        r.record("tensor", torch.tensor(value))
    assert r.epoch_values() == {"inf": float("inf"), "tensor": float("inf")}


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        ("x", {}, TypeError, r"log\('key'\) got str: log a number"),
        (None, {}, TypeError, r"log\('key'\) got NoneType"),
        (torch.ones(0), {}, ValueError, r"log\('key'\) got a tensor of shape \(0,\)"),
        (
            1.0,
            {"reduce": "maen"},
            ValueError,
            r"log\('key', reduce='maen'\) is unknown; did you mean 'mean'\?; possible: mean, sum, min, max",
        ),
        (
            torchmetrics.MetricCollection([torchmetrics.MeanMetric()]),
            {},
            TypeError,
            r"log\('key'\) got a MetricCollection: use log_dict",
        ),
    ],
)
def test_errors_name_the_key(value: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        new_recorder().record("key", value, **options)


def test_a_name_must_be_text() -> None:
    with pytest.raises(TypeError, match=r"log\(\) takes a name \(str\) first, got 3"):
        new_recorder().record(3, 1.0)  # type: ignore[arg-type]


def test_the_state_goes_on(tmp_path: Path) -> None:
    first, second = new_recorder(), new_recorder()
    first.size = 3
    first.record("a", torch.tensor(1.0))
    first.record("m", 2.0, reduce="max")
    second.load_state_dicts([first.state_dict()])
    second.size = 1
    second.record("a", torch.tensor(5.0))
    second.record("m", 1.0, reduce="max")
    assert second.epoch_values() == {"a": 2.0, "m": 2.0}


class Measures(Weight):
    """Logs torchmetrics objects in training and validation, and numbers with unequal weights."""

    def __init__(self) -> None:
        super().__init__()
        make = torchmetrics.classification.MulticlassAccuracy
        self.accuracy = make(3, average="micro")
        self.train_accuracy = make(3, average="micro")
        self.several = torchmetrics.MetricCollection(
            {"micro": make(3, average="micro"), "macro": make(3, average="macro")}, prefix="val/"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        targets, guesses = batch
        self.train_accuracy(guesses, targets)
        self.log("train/acc", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train/mean", targets.float().mean(), on_epoch=True)
        return (self.w * targets).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        targets, guesses = batch
        self.accuracy.update(guesses, targets)
        self.log("val/acc", self.accuracy)
        self.several.update(guesses, targets)
        self.log_dict(self.several)
        self.log("val/mean", targets.float().mean())
        self.log("val/count", float(len(targets)), reduce="sum")
        if self.global_rank == 0:
            self.log("only/first", 3.0)
        else:
            self.log("only/other", 5.0)


class Epochs(Callback):
    """The values of each epoch and evaluation."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        self.values.append(metrics)


def ranks_measure(root: str) -> list[dict[str, float]]:
    epochs = Epochs()
    data = torch.utils.data.TensorDataset(TARGETS, GUESSES)
    settings = {"devices": "auto", "callbacks": epochs, "max_epochs": 2, "log_every_n_steps": 0}
    fit(root, **settings).run(Measures(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=3))
    return epochs.values


def expected() -> tuple[dict[str, float], dict[str, float]]:
    # Classes 0, 1, 2 are right in 2 of 3, 2 of 2, 1 of 2 samples.
    val = {
        "val/acc": 5 / 7,
        "val/micro": 5 / 7,
        "val/macro": (2 / 3 + 1 + 1 / 2) / 3,
        "val/mean": 6 / 7,
        "val/count": 7.0,
    }
    return val, {"train/acc_epoch": 5 / 7, "train/mean_epoch": 6 / 7}


def test_torchmetrics_and_means_on_one_rank(tmp_path: Path) -> None:
    val, train = expected()
    val["only/first"] = 3.0
    for values, right in zip(ranks_measure(str(tmp_path)), [val, train] * 2, strict=True):
        assert values == pytest.approx(right, rel=1e-6)


def test_torchmetrics_and_means_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    val, train = expected()
    val |= {"only/first": 3.0, "only/other": 5.0}  # names that one rank alone logs
    first, second = ranks_of(ranks_measure, 2, tmp_path)
    assert first == second
    for values, right in zip(first, [val, train] * 2, strict=True):
        assert values == pytest.approx(right, rel=1e-6)


def test_a_torchmetrics_step_value_is_that_of_the_step(tmp_path: Path) -> None:
    epochs = Epochs()
    data = torch.utils.data.TensorDataset(TARGETS, GUESSES)
    fit(tmp_path, callbacks=epochs, log_every_n_steps=1).run(Measures(), DataLoader(data, batch_size=2))
    assert [v["train/acc_step"] for v in epochs.values[:-1]] == [1.0, 0.5, 0.5, 1.0]


def test_a_metric_that_gives_no_number(tmp_path: Path) -> None:
    class Bad(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.each = torchmetrics.classification.MulticlassAccuracy(3, average=None)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.each.update(GUESSES, TARGETS)
            self.log("each", self.each)

    with pytest.raises(ValueError, match=r"log\('each'\): MulticlassAccuracy.compute\(\) returned tensor"):
        fit(tmp_path).validate(Bad(), ones(1))


def test_an_epoch_metric_survives_a_resume_in_the_middle(tmp_path: Path) -> None:
    class Logs(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("n", float(batch_idx), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    class Saves(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            if run.step == 3:
                run.save_checkpoint()

    assert fit(tmp_path, callbacks=Saves()).run(Logs(), ones(6)).metrics == {"n": 2.5}
    assert json.loads((tmp_path / "checkpoints/step=00000003/manifest.json").read_text())["counters"]["batch_idx"] == 3
    assert fit(tmp_path).run(Logs(), ones(6), resume="last").metrics == {"n": 2.5}
