"""torchmetrics objects given to ``self.log``: a step's, a loader's and an epoch's value over all ranks. Numbers are worked out by hand."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from support.ranks import ranks_of_file
from support.toys import Weight, fit
from torch import Tensor
from torch.utils.data import DataLoader

from engine import Callback

Mean, Max, Cat = torchmetrics.MeanMetric, torchmetrics.MaxMetric, torchmetrics.CatMetric


class Rows(Callback):
    """What is logged: (step, values)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def data(values: list[float], batch_size: int = 1) -> DataLoader[Any]:
    return DataLoader(torch.tensor(values).unsqueeze(1), batch_size=batch_size)  # type: ignore[arg-type]


def rows(module: Any, *loaders: Any, **settings: Any) -> list[Any]:
    """What a run logs, on as many ranks as there are."""
    found = Rows()
    with tempfile.TemporaryDirectory() as root:
        fit(root, **{"devices": "auto", "log_every_n_steps": 1, "callbacks": found, **settings}).run(module, *loaders)
    return found.rows


def evaluated(module: Any, loaders: Any) -> Any:
    with tempfile.TemporaryDirectory() as root:
        return fit(root, devices="auto").test(module, loaders)


# -- evaluation -----------------------------------------------------------------------------------------------------------------------


class Evaluated(Weight):
    """Logs the mean and the largest of the values that it is evaluated on, by torchmetrics objects."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mean, self.largest, self.options = Mean(), Max(), options

    def seen(self, batch: Tensor) -> None:
        self.mean.update(batch)
        self.largest.update(batch)
        self.log("mean", self.mean, **self.options)
        self.log("largest", self.largest, **self.options)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen(batch)

    test_step = validation_step


def rank_one_sample() -> Any:
    """One sample for two ranks: the second has no batch."""
    validated = rows(Evaluated(), data([1.0, 1.0]), data([3.0]))
    return [validated, evaluated(Evaluated(), data([3.0]))]


LOADERS = ([1.0, 2.0, 3.0], [10.0, 40.0], [7.0])
"""Three loaders: two batches on the first rank and one on the second, one on each, one on the first alone."""
BY_LOADER = {"mean/dataloader_idx_0": 2.0, "mean/dataloader_idx_1": 25.0, "mean/dataloader_idx_2": 7.0,
             "largest/dataloader_idx_0": 3.0, "largest/dataloader_idx_1": 40.0, "largest/dataloader_idx_2": 7.0}  # fmt: skip


def rank_loaders() -> Any:
    """One object over several loaders."""
    found = evaluated(Evaluated(), [data(values) for values in LOADERS])
    return {name: value for row in found for name, value in row.items()}


class Pooled(Evaluated):
    """Looks at its objects at the end as well, by itself and by logging them."""

    def on_test_epoch_end(self) -> None:
        self.log("at the end", self.mean)
        self.log("by itself", self.largest.compute())


def rank_pooled() -> Any:
    """At the end of an evaluation an object has seen all loaders; it is reset afterwards, whoever has logged it."""
    module = Pooled()
    several = evaluated(module, [data(values) for values in LOADERS])
    one = evaluated(module, data([1.0, 2.0, 6.0]))
    return [several[0]["at the end"], several[0]["by itself"], one, module.mean.update_count]


class OnOneRank(Weight):
    """Only the second rank logs; both update."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.apart = Mean(), [Mean()]

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(batch)
        self.apart[0].update(batch)
        if self.global_rank == 1:
            self.log("mean", self.mean)
        self.log("apart", self.apart[0])


def rank_logged_on_one_rank() -> Any:
    """An object counts with what every rank has seen, one that is not in the module included."""
    return evaluated(OnOneRank(), data([1.0, 2.0, 6.0]))


class Correlation(Weight):
    """States that are stacked over ranks, and lists on the CPU; a composition."""

    def __init__(self) -> None:
        super().__init__()
        self.pearson, self.auroc = (
            torchmetrics.PearsonCorrCoef(),
            torchmetrics.classification.BinaryAUROC(compute_on_cpu=True),
        )
        self.first, self.second = Mean(), Mean()
        self.sum = self.first + self.second

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.pearson.update(x, y)
        self.auroc.update(x.sigmoid(), (y > 0).long())
        self.sum.update(x)
        for name in ("pearson", "auroc", "sum"):
            self.log(name, getattr(self, name))


X, Y = torch.tensor([0.5, -1.0, 2.0, 1.5, -0.5]), torch.tensor([1.0, -2.0, 1.5, 3.0, 0.5])


def rank_states() -> Any:
    pairs = torch.utils.data.TensorDataset(X, Y)
    four = torch.utils.data.TensorDataset(X[:4], Y[:4])
    return evaluated(Correlation(), [DataLoader(pairs, batch_size=1), DataLoader(four, batch_size=1)])


# -- steps ----------------------------------------------------------------------------------------------------------------------------


class Stepped(Weight):
    """Logs objects in training, by ``forward`` or ``update``."""

    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.how = how
        self.mean, self.largest = Mean(), Max()
        self.group = torchmetrics.MetricCollection(
            {"a": torchmetrics.MeanSquaredError(), "b": torchmetrics.MeanSquaredError(squared=False)}
        )
        self.ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for metric in (self.mean, self.largest):
            metric(batch) if self.how == "forward" else metric.update(batch)
        self.group(batch, 0 * batch) if self.how == "forward" else self.group.update(batch, 0 * batch)
        self.log("mean", self.mean, on_epoch=True)
        self.log("largest", self.largest)
        self.log_dict(self.group, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.ends.append(float(self.largest.compute()))
        self.log("again", self.largest)


TRAINED = [3.0, 1.0, 2.0, 6.0, 4.0, 8.0, 5.0]
"""Windows of two micro-batches. On one process of micro-batches of 2: (3 1 2 6) (4 8 5). On two, of 1: the same samples a step."""


def rank_steps() -> Any:
    size = 2 // int(os.environ.get("WORLD_SIZE", "1"))
    found = []
    for how in ("forward", "update"):
        module = Stepped(how)
        logged = rows(module, data(TRAINED, size), accumulate_grad_batches=2, max_epochs=2)
        found.append([logged, module.ends, hasattr(module.mean.update, "__self__")])
    return found


class Ends(Weight):
    """An object that is not in the module, over a resume in the middle of an epoch."""

    def __init__(self, metrics: list[Any]) -> None:
        super().__init__()
        self.metrics = metrics

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.metrics[0](batch)
        self.log("mean", self.metrics[0], on_epoch=True)
        return super().training_step(batch, batch_idx)


class Saves(Callback):
    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.step == 2:
            run.save_checkpoint()


def rank_resumed() -> Any:
    found = []
    with tempfile.TemporaryDirectory() as root:
        if "TEST_REPORT" in os.environ:
            root = str(Path(os.environ["TEST_REPORT"]).parent / "resumed")  # one for all ranks
        for resume in (None, "last"):
            logged = Rows()
            settings: dict[str, Any] = {"devices": "auto", "log_every_n_steps": 1, "callbacks": [logged, Saves()]}
            fit(root, **settings).run(Ends([Mean()]), data([3.0, 1.0, 2.0, 6.0, 4.0, 8.0, 5.0, 1.0]), resume=resume)
            found.append(logged.rows)
    return found


# -- what is refused ------------------------------------------------------------------------------------------------------------------


class Refused(Weight):
    """Gives something to ``log`` in ``training_step``, and an object of its own in validation."""

    def __init__(self, metric: Any, **options: Any) -> None:
        super().__init__()
        self.metric, self.options = metric, options

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.metric.update(batch)
        self.log("x", self.metric, **self.options)
        return super().training_step(batch, batch_idx)


class Foreign:
    """An object of another library."""

    def update(self, batch: Tensor) -> None: ...
    def compute(self) -> float:
        return 1.0

    def reset(self) -> None: ...


def refused(module: Any) -> str:
    try:
        return str(rows(module, data([1.0, 2.0])))
    except (TypeError, ValueError) as error:
        return str(error)


def rank_refusals() -> Any:
    epoch = {"on_step": False, "on_epoch": True}
    return [
        refused(Refused(Mean(dist_sync_on_step=True), **epoch)),
        refused(Refused(Mean(sync_on_compute=False), **epoch)),
        refused(Refused(Mean(dist_sync_fn=print), **epoch)),
        refused(Refused(Foreign(), **epoch)),
    ]


# -- the tests ------------------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    name.removeprefix("rank_"): function for name, function in list(globals().items()) if name.startswith("rank_")
}


@pytest.fixture(scope="module")
def by_rank() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.fixture(params=["one process", "two ranks"])
def found(request: Any) -> Any:
    """What a function of this file gives on one process, or on the first of two ranks; both ranks give the same."""

    def give(name: str) -> Any:
        if request.param == "one process":
            return FUNCTIONS[name]()
        first, second = request.getfixturevalue("by_rank")[name]
        assert first == second
        return first

    return give


def as_lists(tree: Any) -> Any:
    return [as_lists(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def test_a_rank_without_a_batch(found: Any) -> None:
    both = {"mean": 3.0, "largest": 3.0}
    validated, tested_ = as_lists(found("one_sample"))
    assert [values for _, values in validated] == [both]
    assert tested_ == [both]


def test_each_loader_has_its_own_value(found: Any) -> None:
    assert found("loaders") == BY_LOADER


def test_at_the_end_an_object_has_seen_all_loaders_and_is_reset(found: Any) -> None:
    pooled, largest, (one,), updates = found("pooled")
    assert (pooled, largest, updates) == (63 / 6, 40.0, 0)
    assert one == {"mean": 3.0, "largest": 6.0, "at the end": 3.0, "by itself": 6.0}


def test_an_object_that_only_one_rank_logs_counts_with_what_all_have_seen(by_rank: Any) -> None:
    assert by_rank["logged_on_one_rank"] == [[{"mean": 3.0, "apart": 3.0}]] * 2


def test_states_that_are_stacked_listed_or_composed(found: Any) -> None:
    for values, count in zip(found("states"), (5, 4), strict=True):
        index = 0 if count == 5 else 1
        x, y = X[:count].double(), Y[:count].double()
        pearson = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
        right = {"pearson": pearson, "auroc": auroc(x, y > 0), "sum": 2 * x.mean().item()}
        assert values == {
            f"{name}/dataloader_idx_{index}": pytest.approx(value, rel=1e-5) for name, value in right.items()
        }


def auroc(scores: Tensor, positive: Tensor) -> float:
    """How often a positive has the higher score."""
    pairs = scores[positive].unsqueeze(1) > scores[~positive]
    return pairs.double().mean().item()


def test_a_steps_value_is_that_of_its_micro_batches_and_ranks(found: Any) -> None:
    first = {"mean_step": 3.0, "largest": 6.0, "a_step": 12.5, "b_step": 12.5**0.5}
    second = {"mean_step": 17 / 3, "largest": 8.0, "a_step": 35.0, "b_step": 35**0.5}
    epoch = {"mean_epoch": 29 / 7, "again": 8.0, "a_epoch": 155 / 7, "b_epoch": (155 / 7) ** 0.5}
    right = [(step, {name: pytest.approx(v, rel=1e-6) for name, v in values.items()})
             for step, values in ((1, first), (2, second), (2, epoch), (3, first), (4, second), (4, epoch))]  # fmt: skip
    for logged, ends, watched in found("steps"):  # by forward, by update
        assert [(step, values) for step, values in logged] == right
        assert ends == [8.0, 8.0]
        assert not watched  # the run has left the object as it was


def test_an_object_that_is_not_in_the_module_survives_a_resume(found: Any) -> None:
    whole, resumed = found("resumed")
    assert whole[-1][1] == {"mean_epoch": 3.75}
    assert as_lists(resumed) == as_lists(whole)[2:]


def test_settings_that_a_value_over_all_ranks_cannot_honour(by_rank: Any) -> None:
    for on_step, on_compute, function, foreign in by_rank["refusals"]:
        assert on_step.startswith(
            "Refused.metric: MeanMetric(dist_sync_on_step=True), but logged values are always over all ranks"
        )
        assert on_compute.startswith("log('x'): MeanMetric(sync_on_compute=False), but")
        assert function.startswith("log('x'): MeanMetric(dist_sync_fn=<built-in function print>), but")
        assert foreign.startswith(
            "log('x') got Foreign, which is not a torchmetrics Metric: its value over all ranks is unknown"
        )


def test_on_one_process_they_hold() -> None:
    epoch = {"on_step": False, "on_epoch": True}
    for metric in (Mean(dist_sync_on_step=True), Mean(sync_on_compute=False)):
        assert rows(Refused(metric, **epoch), data([1.0, 2.0])) == [(2, {"x": 1.5})]
    assert rows(Refused(Foreign(), **epoch), data([1.0, 2.0])) == [(2, {"x": 1.0})]


@pytest.mark.parametrize("metric", [Foreign(), torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=2)])
def test_objects_whose_steps_cannot_be_told_apart(metric: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"log\('x'\): the updates of (Foreign|Running) cannot be separated by step; give on_step=False",
    ):
        rows(Refused(metric), data([1.0, 2.0]))


class Mixed(Weight):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("x", self.given[batch_idx])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1.0, Mean()), "got a torchmetrics object, and a number before"),
        ((Mean(), 1.0), "got a number, and a torchmetrics object before"),
        ((Mean(), Mean()), "got a torchmetrics object, and another torchmetrics object before"),
    ],
)
def test_one_name_is_one_thing(given: Any, message: str) -> None:
    module = Mixed()
    module.given = given
    for metric in given:
        if not isinstance(metric, float):
            metric.update(1.0)
    with pytest.raises(ValueError, match=message):
        rows(module, data([1.0, 2.0]))


class StepInValidation(Evaluated):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("x", batch.mean(), **self.options)


def test_on_step_in_an_evaluation() -> None:
    with pytest.warns(
        UserWarning, match=r"log\('x', on_step=True\) in an evaluation .* only the epoch's value is reported"
    ):
        assert rows(StepInValidation(on_step=True, on_epoch=False), data([1.0]), data([1.0])) == [(1, {"x": 1.0})]
    assert rows(StepInValidation(on_step=True), data([1.0]), data([1.0])) == [
        (1, {"x_epoch": 1.0})
    ]  # warned once already


def test_an_objects_copy_in_mid_run_is_its_own() -> None:
    copies = []

    class Copies(Stepped):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            copies.append(self.mean.clone())
            copies[-1].update(100.0)

    found = rows(Copies("update"), data([1.0, 2.0]))
    assert [values["mean_step"] for _, values in found[:2]] == [1.0, 2.0]
    assert copies[0].compute() == 50.5
