"""The options of ``log`` under Lightning's names and in its order: honoured, or an error that says why not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from support.ranks import ranks_of_file
from support.toys import Weight, fit, ones
from torch import Tensor
from torch.utils.data import DataLoader

import engine.utils.log
from callbacks import EarlyStopping, ModelCheckpoint
from callbacks.loggers import CSVLogger
from engine import Callback, Fit, TrainModule


class Logs(Weight):
    """Logs the batch's mean in ``training_step`` with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("x", batch.mean(), on_step=False, on_epoch=True, **self.options)
        return super().training_step(batch, batch_idx)


def loaders(*values: float) -> list[Any]:
    return [DataLoader(torch.full((2, 1), value), batch_size=2) for value in values]


def test_the_order_is_lightnings() -> None:
    lightning = pytest.importorskip("lightning")
    for name in ("log", "log_dict"):
        theirs = list(inspect.signature(getattr(lightning.LightningModule, name)).parameters.values())
        ours = list(inspect.signature(getattr(TrainModule, name)).parameters.values())
        assert [each.name for each in ours] == [*(each.name for each in theirs), "reduce"]
        assert [each.default for each in ours[:-1]] == [each.default for each in theirs]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 2.0),
        ("avg", 2.0),
        ("SUM", 6.0),
        ("min", 1.0),
        (torch.mean, 2.0),
        (torch.sum, 6.0),
        (torch.min, 1.0),
        (torch.max, 3.0),
        (torch.amax, 3.0),
    ],
)
def test_reductions_by_name_and_by_function(reduce_fx: Any, expected: float, tmp_path: Path) -> None:
    data = [torch.full((1, 1), value) for value in (1.0, 2.0, 3.0)]
    result = fit(tmp_path).run(Logs(reduce_fx=reduce_fx), data)
    assert result.metrics["x"] == expected


def test_what_is_true_in_any_case_is_accepted(tmp_path: Path) -> None:
    options = {
        "sync_dist": True,
        "logger": True,
        "enable_graph": False,
        "metric_attribute": "x",
        "sync_dist_group": None,
    }
    assert fit(tmp_path).run(Logs(**options), ones(2)).metrics["x"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_graph": True}, r"log\('x', enable_graph=True\): a logged value is detached"),
        ({"reduce_fx": torch.median}, r"log\('x', reduce_fx=.*is not possible: .*mean, sum, min, max"),
        ({"reduce_fx": "median"}, r"log\('x', reduce_fx='median'\) is unknown; .*possible: mean, sum, min, max"),
        ({"reduce_fx": "sum", "reduce": "max"}, r"reduce_fx='sum' and reduce='max', two names of one option"),
    ],
)
def test_what_contradicts_is_an_error(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path).run(Logs(**options), ones(1))


def test_positional_calls_mean_what_they_mean_in_lightning(tmp_path: Path) -> None:
    class Positional(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log(
                "a", batch.mean(), True, False, False, True, "sum"
            )  # prog_bar, logger, on_step, on_epoch, reduce_fx
            self.log_dict({"b": 1.0}, False, True, True, True)
            return super().training_step(batch, batch_idx)

    result = fit(tmp_path).run(Positional(), ones(3))
    assert (result.metrics["a"], result.metrics["b_step"], result.metrics["b_epoch"]) == (3.0, 1.0, 1.0)


# -- logger=False ---------------------------------------------------------------------------------------------------------------


def test_without_loggers_a_value_reaches_callbacks_and_the_progress_bar_only(tmp_path: Path) -> None:
    class Quiet(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("quiet", batch.mean(), prog_bar=True, logger=False, on_step=True, on_epoch=True)
            self.log("loud", batch.mean())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("score", self.w.sum(), logger=False)

    class Sees(Callback):
        def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
            seen.update(metrics)

        def on_train_end(self, run: Any, module: Any) -> None:
            shown.update(run.progress)

    seen: dict[str, float] = {}
    shown: dict[str, float] = {}
    best = ModelCheckpoint(monitor="score", mode="min")
    trainer = fit(
        tmp_path,
        max_epochs=3,
        log_every_n_steps=1,
        callbacks=[Sees(), CSVLogger(), best, EarlyStopping("score", mode="min", patience=9)],
    )
    result = trainer.run(Quiet(), ones(2), ones(1))
    assert {"quiet_step", "quiet_epoch", "loud", "score"} <= set(seen)
    assert shown == {"quiet_step": 1.0, "quiet_epoch": 1.0}
    assert (result.metrics["score"], result.metrics["quiet"]) == (-6.0, 1.0)
    assert result.best_checkpoint is not None
    text = "".join(path.read_text() for path in tmp_path.rglob("*.csv"))
    assert "loud" in text
    assert "quiet" not in text
    assert "score" not in text


def test_hyperparameters_that_loggers_do_not_get(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Sees(Callback):
        def on_fit_start(self, run: Any, module: Any) -> None:
            seen.update(run.hyperparameters)

    module = Weight()
    module.save_hyperparameters({"a": 1, "b": {"c": 2}})
    module.save_hyperparameters({"hidden": 3}, logger=False)
    fit(tmp_path, callbacks=Sees()).run(module, ones(1))
    assert seen == {"a": 1, "b": {"c": 2}}


# -- outside of steps -----------------------------------------------------------------------------------------------------------


def test_what_is_logged_before_an_epochs_steps_belongs_to_the_epoch(tmp_path: Path) -> None:
    class Starts(Weight):
        def on_train_start(self) -> None:
            self.log("once", 5.0)

        def on_train_epoch_start(self) -> None:
            self.log("epoch", float(self.current_epoch + 1))

    result = fit(tmp_path, max_epochs=2).run(Starts(), ones(70))  # with steps between two log boundaries
    assert (result.metrics["once"], result.metrics["epoch"]) == (5.0, 2.0)


def test_a_log_that_nobody_sees_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Predicts(Weight):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return batch

        def on_train_end(self) -> None:
            self.log("y", 1.0)

    monkeypatch.setattr(engine.utils.log, "_said", set())
    with pytest.warns(UserWarning, match=r"log\('x'\) in a prediction is not reported: return the value"):
        fit(tmp_path).predict(Predicts(), ones(2))
    with pytest.warns(
        UserWarning, match=r"log\('y'\) after the training is not reported: log it in on_train_epoch_end"
    ):
        assert "y" not in fit(tmp_path).run(Predicts(), ones(2)).metrics


# -- several loaders ------------------------------------------------------------------------------------------------------------


class Named(Weight):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log(self.names[dataloader_idx], batch.mean(), add_dataloader_idx=False)
        self.log("both", batch.mean())


def test_names_without_a_loaders_number(tmp_path: Path) -> None:
    first, second = fit(tmp_path).validate(Named("a", "b"), loaders(1.0, 2.0))
    assert first == {"a": 1.0, "both/dataloader_idx_0": 1.0}
    assert second == {"b": 2.0, "both/dataloader_idx_1": 2.0}
    assert fit(tmp_path).validate(Named("a"), loaders(1.0)) == [{"a": 1.0, "both": 1.0}]


def test_two_loaders_cannot_share_a_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"log\('a', add_dataloader_idx=False\): another loader of this evaluation logs this"
    ):
        fit(tmp_path).validate(Named("a", "a"), loaders(1.0, 2.0))
    trainer, module = fit(tmp_path), Named("a", "b")
    assert [trainer.validate(module, loaders(1.0, 2.0))[0]["a"] for _ in range(2)] == [
        1.0,
        1.0,
    ]  # not across evaluations


# -- torchmetrics objects -------------------------------------------------------------------------------------------------------


class Measured(Weight):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options, self.mean, self.other = options, torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.mean(batch)
        self.log("mean", self.mean, **self.options)


def test_the_attribute_of_a_torchmetrics_object(tmp_path: Path) -> None:
    found = fit(tmp_path).validate(Measured(metric_attribute="mean", sync_dist=True, rank_zero_only=True), ones(1))
    assert found == [{"mean": 1.0}]
    with pytest.raises(ValueError, match=r"metric_attribute='other'\) got another object than Measured.other"):
        fit(tmp_path).validate(Measured(metric_attribute="other"), ones(1))
    with pytest.raises(ValueError, match=r"metric_attribute='man'\): Measured has no metric of this name"):
        fit(tmp_path).validate(Measured(metric_attribute="man"), ones(1))


# -- several ranks --------------------------------------------------------------------------------------------------------------


class OfRanks(Logs):
    """Rank r logs r + 1 in each of two steps; ``alone``: rank 0 only."""

    def __init__(self, alone: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.alone = alone

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if not self.alone or self.global_rank == 0:
            self.log("x", float(self.global_rank + 1), on_step=True, on_epoch=True, **self.options)
        return (self.w * batch).mean()


def _metrics(module: Any) -> Any:
    trainer = Fit(strategy="ddp", accelerator="cpu", max_epochs=1, log_every_n_steps=1)
    try:
        return {name: value for name, value in trainer.run(module, ones(4)).metrics.items() if name != "_"}
    except ValueError as error:
        return str(error)


def rank_sync_dist() -> Any:
    return [_metrics(OfRanks(sync_dist=flag)) for flag in (False, True)]


def rank_rank_zero_only() -> Any:
    return [_metrics(OfRanks(rank_zero_only=True)), _metrics(OfRanks(rank_zero_only=True, alone=True))]


def rank_group() -> Any:
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(2)]
    return [
        _metrics(OfRanks(sync_dist=True, sync_dist_group=dist.group.WORLD)),
        _metrics(OfRanks(sync_dist=True, sync_dist_group=alone[dist.get_rank()])),
    ]


@pytest.fixture(scope="module")
def by_rank() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_values_are_over_all_ranks_with_and_without_sync_dist(by_rank: Any) -> None:
    over_all = {"x": 1.5, "x_step": 1.5, "x_epoch": 1.5}
    assert by_rank["sync_dist"] == [[over_all, over_all]] * 2


def test_rank_0s_value_alone(by_rank: Any) -> None:
    of_rank_0 = {"x": 1.0, "x_step": 1.0, "x_epoch": 1.0}
    assert by_rank["rank_zero_only"] == [[of_rank_0, of_rank_0]] * 2


def test_a_group_of_some_ranks_is_an_error(by_rank: Any) -> None:
    for world, alone in by_rank["group"]:
        assert world["x"] == 1.5
        assert alone.startswith(
            "log('x', sync_dist_group=...) is a group of 1 rank(s), but logged values are always over all 2"
        )
