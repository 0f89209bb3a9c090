from __future__ import annotations

import csv
import re

import pytest
import torch

from callbacks import CSVLogger, ModelCheckpoint
from callbacks.loggers.csv_cells import from_cell
from callbacks.report.runs import read_run
from engine import Callback, TrainModule


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_and_columns_of_a_run(make_fit, scripted, batches, tmp_path):
    module = scripted([0.25, 0.125])
    make_fit(max_epochs=2, log_every_n_steps=2, callbacks=[CSVLogger()]).run(module, batches, batches)
    rows = read(tmp_path / "metrics.csv")
    assert list(rows[0])[:2] == ["step", "epoch"]
    assert [(int(row["step"]), float(row["score"])) for row in rows if row["score"]] == [(4, 0.25), (8, 0.125)]
    assert {int(row["step"]) for row in rows} == {1, 2, 4, 6, 8}
    assert {int(row["epoch"]) for row in rows if int(row["step"]) <= 4} == {0}
    assert {int(row["epoch"]) for row in rows if int(row["step"]) == 6} == {1}


def test_a_new_column_loses_no_row(make_fit, scripted, batches, tmp_path):
    class Growing(scripted):
        def training_step(self, batch, batch_idx):
            self.log(f"name,{batch_idx}", float(batch_idx))
            return (self.weight * batch).mean()

    make_fit(log_every_n_steps=1, callbacks=[CSVLogger(name="m.csv")]).run(Growing(), batches)
    rows = read(tmp_path / "m.csv")
    for number in range(4):
        assert [
            float(row[f"name,{number}"]) for row in rows if int(row["step"]) == number + 1 and row[f"name,{number}"]
        ] == [number]
    assert rows[0]["name,3"] == ""


FORMULAS = (
    "=1+1",
    "+1+1",
    "-1+1",
    "@SUM(1)",
    "\t=1+1",
    "\r=1+1",
    "\uff1d1+1",
    "a;=1+1",
    'a;"=1+1',
    "=x,y",
    "'=1+1",
    "it's",
)


def test_names_that_come_late(make_fit, tmp_path):
    """Each step logs a name that no step before has logged, some of them odd."""

    class Late(TrainModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            self.log(odd_names[batch_idx], float(batch_idx))
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    odd_names = ["a", "b,c", 'say "d"', "e\r\nf", "=g", "h"]
    make_fit(max_epochs=1, log_every_n_steps=1, callbacks=[CSVLogger()]).run(
        Late(), [torch.ones(1, 1)] * len(odd_names)
    )
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    columns = list(map(from_cell, header))
    assert [name for name in columns if name in odd_names] == odd_names
    for index, row in enumerate(rows):
        cells = dict(zip(columns, row, strict=True))
        assert float(cells[odd_names[index]]) == index
        assert all(cells[name] == "" for name in odd_names[index + 1 :])


def test_a_spreadsheet_calculates_no_name(make_fit, scripted, batches, tmp_path):
    """The names of two runs, before and after a new column and a resume; numbers stay numbers."""

    class Names(scripted):
        def training_step(self, batch, batch_idx):
            for name in FORMULAS[: 6 + 6 * batch_idx]:
                self.log(name, -1.5)
            return (self.weight * batch).mean()

    for steps in (2, 4):
        callbacks = [CSVLogger(), ModelCheckpoint()]
        make_fit(log_every_n_steps=1, max_steps=steps, callbacks=callbacks).run(Names(), batches, resume="auto")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    own = header[3:]
    assert len(own) == len(FORMULAS)
    for name, cell in zip(FORMULAS, own, strict=True):
        # As a program sees it, and where a spreadsheet takes semicolons or tabs for the ends of cells.
        for part in (cell, *re.split(r"[;\t]", cell)):
            assert part.strip('"')[:1] not in tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"), (name, cell)
        assert from_cell(cell) == name
    assert own[-1] == "it's"
    assert [row[3] for row in rows] == ["-1.5"] * 4
    curves = read_run(tmp_path).metrics
    assert set(curves) == set(FORMULAS)
    assert curves["=1+1"].values.tolist() == [-1.5] * 4


def test_the_sanity_check_has_no_row(make_fit, scripted, batches, tmp_path):
    make_fit(num_sanity_val_steps=1, log_every_n_steps=2, callbacks=[CSVLogger()]).run(
        scripted([0.5, 0.25]), batches, batches
    )
    assert [float(row["score"]) for row in read(tmp_path / "metrics.csv") if row["score"]] == [0.25]


def test_each_row_is_in_the_file_at_once(make_fit, scripted, batches, tmp_path):
    class Look(Callback):
        seen = []

        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            self.seen.append(len(read(tmp_path / "metrics.csv")) if (tmp_path / "metrics.csv").exists() else 0)

    make_fit(log_every_n_steps=1, max_steps=3, callbacks=[CSVLogger(), Look()]).run(scripted(), batches)
    # Whether the row of a step comes before or after that step's hook, no row is ever more than one step late.
    assert Look.seen in ([0, 1, 2], [1, 2, 3])


def test_resuming_cuts_the_rows_that_did_not_happen(make_fit, scripted, batches, tmp_path):
    def callbacks():
        return [CSVLogger(), ModelCheckpoint(every="4 steps", save_top_k=-1)]

    make_fit(max_epochs=3, log_every_n_steps=1, callbacks=callbacks()).run(scripted(), batches)
    whole = read(tmp_path / "metrics.csv")
    checkpoint = tmp_path / "checkpoints" / "step=00000004"
    make_fit(max_epochs=3, log_every_n_steps=1, callbacks=callbacks()).run(scripted(), batches, resume=checkpoint)
    again = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in again if row["train/weight"]] == [
        row["step"] for row in whole if row["train/weight"]
    ]
    steps = [int(row["step"]) for row in again]
    assert steps == sorted(steps)
    assert not (tmp_path / "metrics.1.csv").exists()


def test_a_new_run_keeps_the_old_file(make_fit, scripted, batches, tmp_path):
    for _ in range(3):
        make_fit(log_every_n_steps=2, max_steps=2, callbacks=[CSVLogger(), CSVLogger(tmp_path / "mine")]).run(
            scripted(), batches
        )
    for name in (
        "metrics.csv",
        "version_1/metrics.csv",
        "version_2/metrics.csv",
        *(f"mine/metrics{i}.csv" for i in ("", ".1", ".2")),
    ):
        assert 2 in {int(row["step"]) for row in read(tmp_path / name)}


def test_an_evaluation_is_logged_at_the_samples_of_its_weights(make_fit, scripted, batches, tmp_path):
    fit, module = make_fit(max_epochs=2, callbacks=[CSVLogger(), ModelCheckpoint()]), scripted()
    fit.run(module, batches)
    fit.test(module, batches)
    fit.test(scripted(), batches, checkpoint="last")
    trained, *tested = read(tmp_path / "metrics.csv")[-3:]
    assert int(trained["samples"]) > 0
    assert [row["samples"] for row in tested] == [trained["samples"]] * 2


def test_a_row_torn_by_a_crash_is_dropped(make_fit, scripted, batches, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,epoch,a\r\n1,0,2.5\r\n2,0,3.7")
    logger = CSVLogger()
    make_fit(callbacks=[logger]).test(scripted(), batches)
    rows = read(path)
    assert [row["a"] for row in rows] == ["2.5", ""]
    assert float(rows[1]["test/mean"]) == 1.0


def test_a_file_of_someone_else_is_not_touched(make_fit, scripted, batches, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("name,age\nada,36\n")
    with pytest.raises(ValueError, match=r"metrics\.csv exists and is not a metrics file"):
        make_fit(callbacks=[CSVLogger()]).test(scripted(), batches)
    assert path.read_text() == "name,age\nada,36\n"


def test_it_is_closed_after_an_error(make_fit, scripted, batches, tmp_path):
    class Failing(scripted):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("as planned")
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(dir=tmp_path / "deep" / "er")
    with pytest.raises(RuntimeError, match="as planned"):
        make_fit(log_every_n_steps=1, callbacks=[logger]).run(Failing(), batches)
    assert logger._file is None
    assert [int(row["step"]) for row in read(tmp_path / "deep" / "er" / "metrics.csv")] == [1, 2]


def test_numbers_survive_the_file(make_fit, scripted, batches, tmp_path):
    class Odd(scripted):
        def training_step(self, batch, batch_idx):
            self.log("nan", float("nan"))
            self.log("third", torch.tensor(1 / 3, dtype=torch.float64))
            return (self.weight * batch).mean()

    make_fit(log_every_n_steps=1, max_steps=1, callbacks=[CSVLogger()]).run(Odd(), batches)
    row = read(tmp_path / "metrics.csv")[0]
    assert float(row["third"]) == 1 / 3
    assert row["nan"] == "nan"


@pytest.mark.parametrize("name", ["", "a/b.csv"])
def test_wrong_name(name):
    with pytest.raises(ValueError, match="name must be"):
        CSVLogger(name=name)
