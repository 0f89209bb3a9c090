"""torchmetrics objects in checkpoints: their states come back, and those of several ranks are put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from support.internals import new_recorder
from support.toys import Weight, fit, ones
from torch import nn

from engine.metrics.torchmetrics_states import load_metric_states, metric_states, unchanged

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        self.all = torchmetrics.CatMetric()
        self.idle = torchmetrics.SumMetric()

    def update(self, *values: float) -> Holder:
        for value in values:
            for metric in (self.mean, self.largest, self.all):
                metric.update(value)
        return self

    def values(self) -> list[Any]:
        return [self.mean.compute().item(), self.largest.compute().item(), self.all.compute().tolist()]


def test_one_state_comes_back() -> None:
    states = metric_states(Holder().update(1.0, 4.0))
    assert sorted(states) == ["all", "largest", "mean"]  # the idle one is left out
    other = Holder().update(9.0)
    load_metric_states(other, [states])
    assert other.values() == [2.5, 4.0, [1.0, 4.0]]
    assert other.update(7.0).values() == [4.0, 7.0, [1.0, 4.0, 7.0]]


def test_states_of_several_ranks_are_put_together() -> None:
    rows = [metric_states(Holder().update(1.0, 4.0)), metric_states(Holder()), metric_states(Holder().update(7.0))]
    other = Holder()
    load_metric_states(other, rows)
    mean, largest, everything = other.values()
    assert (mean, largest, sorted(everything)) == (4.0, 7.0, [1.0, 4.0, 7.0])
    assert other.mean.update_count == 3


class Average(torchmetrics.Metric):
    """A state that is averaged over ranks."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.value = (self.value * (self.update_count - 1) + value) / self.update_count

    def compute(self) -> torch.Tensor:
        return self.value


def test_averaged_states_are_weighted_by_updates() -> None:
    one, two, other = (nn.ModuleList([Average()]) for _ in range(3))
    for value in (1.0, 2.0, 3.0):
        one[0].update(value)
    two[0].update(10.0)
    load_metric_states(other, [metric_states(one), metric_states(two)])
    assert other[0].value.item() == pytest.approx(4.0)


def test_states_that_cannot_be_put_together() -> None:
    one, other = (nn.ModuleList([torchmetrics.PearsonCorrCoef()]) for _ in range(2))
    one[0].update(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]))
    rows = [metric_states(one)] * 2
    with pytest.raises(
        ValueError, match=r"PearsonCorrCoef \('0'\) had on several ranks cannot be merged: resume with as many"
    ):
        load_metric_states(other, rows)


def test_a_repeated_batch_leaves_no_trace() -> None:
    holder = Holder().update(1.0)
    with unchanged(holder):
        holder.update(100.0)
    assert holder.values() == [1.0, 1.0, 1.0]  # one value concatenated is itself
    assert holder.mean.update_count == 1


def test_names_of_logged_metrics() -> None:
    def recorder() -> Any:
        made = new_recorder()
        made.module = Holder()
        return made

    first, second = recorder(), recorder()
    first.record("train/mean", first.module.mean, prog_bar=True)
    first.record("loss", 1.0)
    saved = first.logged_metrics()
    assert saved == {
        "train/mean": {"metric": "mean", "options": [False, True, True, "mean", True, True, False], "parts": None}
    }
    second.load_logged_metrics([saved | {"gone": {"metric": "no", "options": [], "parts": None}}])
    assert list(second.slots) == ["train/mean"]
    second.module.mean.update(3.0)
    assert second.epoch_values() == {"train/mean": 3.0}


@pytest.mark.parametrize("version", ["0.11.4", "1.3.2", "1.3.0rc1", "1.4.0", "1.10.0", "2.0"])
def test_a_release_that_is_too_old_is_named(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Logs(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch)
            self.log("mean", self.mean)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(torchmetrics, "__version__", version)
    if version.startswith(("0", "1.3")):
        with pytest.raises(
            RuntimeError, match=rf"torchmetrics {version} is installed, and its metrics need at least 1\.4 here"
        ):
            fit(tmp_path).run(Logs(), ones(1))
    else:
        fit(tmp_path).run(Logs(), ones(1))
