"""Sums on a device without float64. The device is pretended: the CPU, on which no operation may return float64."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Weight, fit, ones
from torch.utils._python_dispatch import TorchDispatchMode

from engine.metrics import reductions
from engine.metrics.float32_pairs import folded
from engine.metrics.log_options import Options
from engine.metrics.reductions import Slot, as_floats, total_of
from engine.utils import accelerator

CPU = torch.device("cpu")


class NoFloat64(TorchDispatchMode):
    """As MPS: float64 is an error. Tensors that never leave the host are made before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return out


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "wide", lambda device: torch.float32)
    monkeypatch.setattr(reductions, "_device_without_float64", lambda pairs: CPU if any(_tensors(pairs)) else None)


def _tensors(pairs: list[Any]) -> list[bool]:
    return [isinstance(item, torch.Tensor) for pair in pairs for item in pair]


def tensors(numbers: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(number, dtype=torch.float32) for number in numbers]


def mean_of(pairs: list[Any]) -> float:
    values, weights = (as_floats(list(items)) for items in zip(*pairs, strict=True))
    return total_of([v * w for v, w in zip(values, weights, strict=True)]) / total_of(weights)


@pytest.mark.parametrize("count", [1, 2, 7, 256])
def test_a_mean_is_nearly_exact(count: int) -> None:
    random.seed(count)
    values = tensors([random.gauss(1000.0, 1.0) for _ in range(count)])
    weights = [random.choice((0.1, 3, 1e-3)) for _ in range(count)]
    exact = [v.item() for v in values]
    expected = math.fsum(v * w for v, w in zip(exact, weights, strict=True)) / math.fsum(weights)
    assert mean_of(folded(values, weights, "mean", CPU)) == pytest.approx(expected, rel=1e-12)
    small = folded(values, [torch.tensor(w) for w in weights], "sum", CPU)
    assert total_of(as_floats([v for v, _ in small])) == pytest.approx(math.fsum(exact), rel=1e-13)


@pytest.mark.parametrize("reduce", ["mean", "sum", "min", "max"])
def test_an_epoch_of_many_folds(narrow: None, reduce: str) -> None:
    random.seed(1)
    numbers = [v.item() for v in tensors([random.random() + (100.0 if i % 7 else 0.0) for i in range(20_000)])]
    slot = Slot("loss", Options(False, True, False, reduce))
    for i, number in enumerate(numbers):
        slot.values.append((torch.tensor(number), 1 + i % 3))
        if len(slot.values) >= reductions.FOLD:
            slot.fold()
    _, values, weights = slot.column()
    assert len(values) < reductions.FOLD
    pairs = list(zip(values, weights, strict=True))
    sizes = [1 + i % 3 for i in range(len(numbers))]
    expected = math.fsum(v * w for v, w in zip(numbers, sizes, strict=True)) / sum(sizes)
    found = {
        "mean": lambda: mean_of(pairs),
        "sum": lambda: total_of(as_floats(values)),
        "min": lambda: min(as_floats(values)),
        "max": lambda: max(as_floats(values)),
    }[reduce]()
    wanted = {"mean": expected, "sum": math.fsum(numbers), "min": min(numbers), "max": max(numbers)}[reduce]
    assert found == pytest.approx(wanted, rel=1e-12)
    slot.to_one_pair()  # for a checkpoint: one pair of numbers, from which another run goes on
    other = Slot("loss", slot.options)
    other.total, other.weight = slot.total, slot.weight
    other.values = [(torch.tensor(5.0), 2)]
    _, values, weights = other.column()
    if reduce == "mean":
        total = expected * sum(sizes)
        assert mean_of(list(zip(values, weights, strict=True))) == pytest.approx(
            (total + 10) / (sum(sizes) + 2), rel=1e-12
        )


def test_whole_numbers_and_infinities() -> None:
    big = 2**40 + 1
    pairs = folded([torch.tensor(big), torch.tensor(True), 2.0**30 + 1], [1, 1, 1], "sum", CPU)
    assert total_of(as_floats([v for v, _ in pairs])) == big + 1 + 2.0**30 + 1
    for number in (math.inf, -math.inf):
        assert mean_of(folded(tensors([1.0, number]), [1, 1], "mean", CPU)) == number
    assert math.isnan(mean_of(folded(tensors([1.0, math.nan]), [1, 1], "mean", CPU)))
    assert mean_of(folded(tensors([3e38, 0.0]), [1, 1], "mean", CPU)) == pytest.approx(1.5e38, rel=1e-6)


def test_nothing_on_the_device_is_float64(narrow: None) -> None:
    slot = Slot("loss", Options(False, True))
    values = tensors([1.0, 2.0, 4.0])
    host = torch.tensor
    with pytest.MonkeyPatch.context() as patch, NoFloat64():
        # Numbers of Python are split on the host, in float64, before they go to the device.
        patch.setattr(
            "engine.metrics.float32_pairs._columns",
            lambda items, device: (host(list(map(float, items))), torch.zeros(3)),
        )
        slot.values = [(value, 2) for value in values]
        slot.fold()
    assert mean_of(slot.values) == 7 / 3


def test_a_run_logs_the_same_means(tmp_path: Path, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Logs(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", torch.tensor(1000.0 + batch_idx), on_epoch=True)
            return super().training_step(batch, batch_idx)

    narrowed = fit(tmp_path / "narrow").run(Logs(), ones(600)).metrics["x_epoch"]
    monkeypatch.undo()
    assert narrowed == fit(tmp_path / "wide").run(Logs(), ones(600)).metrics["x_epoch"] == 1000 + 599 / 2
