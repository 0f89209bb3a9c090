from __future__ import annotations

import csv

import pytest
import torch

from callbacks import CSVLogger, LearningRateMonitor


def rows(tmp_path):
    with (tmp_path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(tmp_path, name):
    return {int(row["step"]): float(row[name]) for row in rows(tmp_path) if row.get(name)}


@pytest.fixture
def module_with(scripted):
    """A module with these optimizers and schedulers."""

    def make(configure):
        class Configured(scripted):
            def configure_optimizers(self):
                return configure(self)

        return Configured([1.0])

    return make


def test_each_step_with_the_value_of_the_next(make_fit, module_with, batches, tmp_path):
    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "step"}
        ]

    make_fit(log_every_n_steps=1, callbacks=[LearningRateMonitor(), CSVLogger()]).run(module_with(configure), batches)
    assert column(tmp_path, "lr-SGD") == {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.0625}


def test_an_epoch_scheduler_is_logged_once_an_epoch(make_fit, module_with, batches, tmp_path):
    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    make_fit(max_epochs=2, log_every_n_steps=1, callbacks=[LearningRateMonitor(), CSVLogger()]).run(
        module_with(configure), batches
    )
    assert column(tmp_path, "lr-SGD") == {1: 1.0, 5: 0.5}


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("step", {1: 1.0, 2: 1.0, 4: 1.0}), ("epoch", {1: 1.0}), (None, {1: 1.0, 2: 1.0, 4: 1.0})],
)
def test_without_a_scheduler(make_fit, scripted, batches, tmp_path, interval, expected):
    make_fit(log_every_n_steps=2, callbacks=[LearningRateMonitor(interval), CSVLogger()]).run(scripted(), batches)
    assert column(tmp_path, "lr-SGD") == expected


def test_validation_rows_have_no_learning_rate(make_fit, scripted, batches, tmp_path):
    make_fit(log_every_n_steps=3, callbacks=[LearningRateMonitor(), CSVLogger()]).run(scripted([1.0]), batches, batches)
    validation = [row for row in rows(tmp_path) if row["score"]]
    assert len(validation) == 1
    assert validation[0]["lr-SGD"] == ""


def test_names_of_groups_schedulers_and_second_optimizers(make_fit, scripted, batches, tmp_path):
    class Several(scripted):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Parameter(torch.zeros(1))
            self.third = torch.nn.Parameter(torch.zeros(1))
            self.fourth = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.weight.sum() + self.other.sum() + self.third.sum() + self.fourth.sum())
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            groups = [{"params": [self.weight], "lr": 0.1}, {"params": [self.other], "lr": 0.2, "name": "slow"}]
            first = torch.optim.SGD(groups, lr=1.0, momentum=0.9, weight_decay=0.01)
            second = torch.optim.SGD([self.third], lr=0.3)
            third = torch.optim.AdamW([self.fourth], lr=0.4, betas=(0.8, 0.9), weight_decay=0.02)
            scheduler = torch.optim.lr_scheduler.ConstantLR(third, factor=1.0)
            return [first, second, third], [{"scheduler": scheduler, "interval": "step", "name": "rate"}]

    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    make_fit(log_every_n_steps=4, callbacks=[monitor, CSVLogger()]).run(Several(), batches)
    last = rows(tmp_path)[-1]
    values = {name: float(value) for name, value in last.items() if value and name.startswith(("lr-", "rate"))}
    assert values == pytest.approx(
        {
            "rate": 0.4,
            "rate-momentum": 0.8,
            "rate-weight_decay": 0.02,
            "lr-SGD/pg1": 0.1,
            "lr-SGD/pg1-momentum": 0.9,
            "lr-SGD/pg1-weight_decay": 0.01,
            "lr-SGD/slow": 0.2,
            "lr-SGD/slow-momentum": 0.9,
            "lr-SGD/slow-weight_decay": 0.01,
            "lr-SGD-1": 0.3,
            "lr-SGD-1-momentum": 0.0,
            "lr-SGD-1-weight_decay": 0.0,
        }
    )


def test_groups_of_one_name_are_an_error(make_fit, module_with, batches):
    def configure(module):
        module.other = torch.nn.Parameter(torch.zeros(1))
        return torch.optim.SGD(
            [{"params": [module.weight], "name": "a"}, {"params": [module.other], "name": "a"}], lr=1.0
        )

    with pytest.raises(ValueError, match=r"different names; they are \['a', 'a'\]"):
        make_fit(callbacks=[LearningRateMonitor()]).run(module_with(configure), batches)


def test_wrong_interval():
    with pytest.raises(ValueError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")


def test_a_step_has_one_row_with_it(make_fit, scripted, batches, tmp_path):
    class Means(scripted):
        def training_step(self, batch, batch_idx):
            self.log("mean", 1.0, on_step=True, on_epoch=True)
            return (self.weight * batch).mean()

    make_fit(log_every_n_steps=2, callbacks=[LearningRateMonitor(), CSVLogger()]).run(Means(), batches)
    # Steps 1, 2 and 4, and the epoch's means, which are published at step 4 as well.
    assert [(row["step"], row["lr-SGD"]) for row in rows(tmp_path)] == [
        ("1", "1.0"),
        ("2", "1.0"),
        ("4", "1.0"),
        ("4", ""),
    ]
