"""Bars where no terminal is, and their figures; test_progress_terminal.py draws them."""

from __future__ import annotations

import csv
import io
import json
import logging
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import callbacks.progress.base as progress
import callbacks.progress.estimates as estimates
from callbacks import CSVLogger, ModelCheckpoint, ModelSummary, RichProgressBar, TQDMProgressBar
from callbacks.progress.base import wrap_items
from callbacks.progress.estimates import duration, number, speed
from engine import Callback
from engine.checkpoint.catalog import entries

BARS = [RichProgressBar, TQDMProgressBar]


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120)


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


@pytest.fixture
def clock(monkeypatch):
    """The bars' clock, which stands still until ``clock.now`` is changed."""
    clock = SimpleNamespace(now=0.0)
    for place in (progress, estimates):
        monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Seconds(Callback):
    """How long batches take on the clock."""

    def __init__(self, clock, training, validation):
        self.clock, self.training, self.validation = clock, training, validation

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        self.clock.now += self.training

    def on_validation_batch_end(self, run, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.clock.now += self.validation


@pytest.mark.parametrize("bar", BARS)
def test_a_pipe_gets_one_line_an_epoch(make_fit, scripted, batches, pipe, bar):
    make_fit(max_epochs=3, log_every_n_steps=1, callbacks=[bar(console=pipe)]).run(scripted([1.0]), batches, batches)
    lines = pipe.file.getvalue().splitlines()
    assert len(lines) == 3
    for epoch, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"epoch {epoch - 1}/2: step {4 * epoch}, [\d.]+ (step/s|s/step), train/weight=-\S+", line)


def test_a_pipe_gets_a_line_every_interval(make_fit, scripted, batches, pipe, clock):
    """A batch takes 1 s, a validation batch 2 s: lines at 10, 20, 30 s, of training or of validation."""
    callbacks = [Seconds(clock, 1.0, 2.0), RichProgressBar(console=pipe, interval_s=10)]
    make_fit(max_epochs=2, val_every=12, log_every_n_steps=1, callbacks=callbacks).run(
        scripted([1.0]), batches * 4, batches
    )
    assert (
        pipe.file.getvalue().splitlines()
        == [
            "epoch 0/1: step 10/32, 1.0 step/s, ETA 0:30, train/weight=-8",  # 22 steps, and 2 validations of 4 batches of 1 s
            "validation: batch 4/4, 2.0 s/batch, ETA 0:00",
            "validation: step 12, train/weight=-11",
            "epoch 0/1: step 16, 1.0 step/s, train/weight=-15",
            "epoch 1/1: step 22/32, 1.0 step/s, ETA 0:18, train/weight=-20",  # 10 steps, and one validation of 8 s
            "validation: batch 4/4, 2.0 s/batch, ETA 0:00",
            "validation: step 24, train/weight=-23",
            "epoch 1/1: step 32, 1.0 step/s, train/weight=-31",
        ]
    )


def test_the_rate_is_the_epochs(make_fit, scripted, batches, pipe, clock):
    """A batch takes 1 s in the first epoch, 4 s in the second: there is no step of the first in the second's rate."""

    class Slower(Seconds):
        def on_train_epoch_start(self, run, module):
            self.training = (1.0, 4.0)[run.epoch]

    callbacks = [Slower(clock, 1.0, 0.0), RichProgressBar(console=pipe, interval_s=7)]
    make_fit(max_epochs=2, val_every=None, log_every_n_steps=1, callbacks=callbacks).run(scripted([1.0]), batches)
    assert [line.rpartition(", train")[0] for line in pipe.file.getvalue().splitlines()] == [
        "epoch 0/1: step 4, 1.0 step/s",
        "epoch 1/1: step 5/8, 4.0 s/step, ETA 0:05",  # 3 steps at the rate of the last minute
        "epoch 1/1: step 7/8, 4.0 s/step, ETA 0:02",
        "epoch 1/1: step 8, 4.0 s/step",
    ]


def test_a_run_of_many_epochs_leaves_every_nth_line(make_fit, scripted, batches, pipe, monkeypatch):
    monkeypatch.setattr(estimates, "MOST_LINES", 4)
    make_fit(max_epochs=10, callbacks=[RichProgressBar(console=pipe)]).run(scripted([1.0]), batches)
    assert re.findall(r"(?m)^epoch (\d+)/9: step (\d+),", pipe.file.getvalue()) == [
        ("0", "4"),
        ("5", "24"),
        ("9", "40"),
    ]


@pytest.mark.parametrize(
    ("epochs", "steps", "now", "n"),
    [
        *((epochs, None, 0, n) for epochs, n in ((1000, 1), (1001, 2), (3000, 5), (10**6, 1000))),
        *((None, None, 0, 1), (None, None, 1500, 2), (None, 80_000, 0, 20), (3000, 40, 0, 1)),
    ],
)
def test_how_many_epochs_leave_a_line(epochs, steps, now, n):
    run = SimpleNamespace(
        max_epochs=epochs, max_steps=steps, num_train_batches=8, window_at=lambda _: 2, state=SimpleNamespace(epoch=now)
    )
    assert estimates.epochs_per_line(run) == n


def test_a_terminal_in_continuous_integration_gets_lines(make_fit, scripted, batches, monkeypatch):
    class Claims(io.StringIO):
        def isatty(self):
            return True

    for variable, value in (("CI", "true"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv("CI", "")
            patch.setenv(variable, value)
            patch.setattr("sys.stdout", shown := Claims())
            make_fit(max_epochs=1, callbacks=[RichProgressBar()]).run(scripted([1.0]), batches)
        assert re.fullmatch(r"epoch 0/0: step 4, .*\n", shown.getvalue())
    # Colors in a log do not make it a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", shown := io.StringIO())
    make_fit(max_epochs=1, callbacks=[RichProgressBar()]).run(scripted([1.0]), batches)
    assert "\x1b" not in shown.getvalue()


@pytest.mark.parametrize("bar", BARS)
def test_the_terminal_is_drawn_and_given_back(make_fit, scripted, batches, terminal, bar):
    make_fit(max_epochs=2, log_every_n_steps=1, callbacks=[bar(console=terminal)]).run(
        scripted([1.0]), batches, batches
    )
    text = terminal.file.getvalue()
    assert "epoch 0/1" in text
    assert "train/weight" in text
    assert text.rfind("\x1b[r") > text.rfind("r\x1b8") - 20 > 0  # the scroll region: set, then the whole screen again
    assert not re.search(r"\x1b\[1;\d+r", text[text.rfind("\x1b[r") :])


def test_it_is_drawn_by_the_clock(make_fit, scripted, batches, terminal, clock):
    drawn = []

    class Counting(RichProgressBar):
        def bar(self, shown, screen):
            drawn.append(shown.done)
            return super().bar(shown, screen)

    bar = Counting(refresh_rate=10, console=terminal)
    make_fit(max_epochs=1, callbacks=[Seconds(clock, 0.03, 0.0), bar]).run(scripted(), batches * 5)
    # A batch takes 0.03 s and 0.1 s lie between two drawings: the start, the first batch, then every fourth, and the end.
    assert drawn == [0, 1, 5, 9, 13, 17, 20]


@pytest.mark.parametrize("bar", BARS)
def test_a_table_after_a_test(make_fit, scripted, batches, pipe, bar):
    class Two(scripted):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("test/mean", batch.mean() + dataloader_idx)
            self.log("test/[bold]", 0.5)

        def on_test_epoch_end(self):
            self.log("test/both", 7)

    loaders = [torch.utils.data.DataLoader(torch.ones(4, 1)) for _ in range(2)]
    fit = make_fit(callbacks=[bar(console=pipe)])
    fit.test(Two(), loaders)
    rows = [row.split() for row in pipe.file.getvalue().splitlines() if "─" not in row]
    assert rows == [
        ["test", "all", "loader", "0", "loader", "1"],
        ["test/mean", "1", "2"],
        ["test/[bold]", "0.5", "0.5"],
        ["test/both", "7"],
    ]
    pipe.file.truncate(0)
    fit.validate(scripted([3.0]), batches)
    rows = [row.split() for row in pipe.file.getvalue().strip("\0").splitlines() if "─" not in row]
    assert rows == [["validation", "value"], ["score", "3"]]


def test_the_rate_leaves_validation_out(make_fit, scripted, batches, pipe, clock):
    callbacks = [Seconds(clock, 0.5, 100.0), RichProgressBar(console=pipe, interval_s=1e9)]
    make_fit(max_epochs=1, callbacks=callbacks).run(scripted([1.0]), batches, batches)
    assert "2.0 step/s" in pipe.file.getvalue()


def test_steps_are_those_of_the_optimizer(make_fit, scripted, batches, terminal, clock):
    """8 batches in windows of 3 are 3 steps; ``max_steps=4`` leaves one for the second epoch."""
    seen = []

    class Looking(RichProgressBar):
        def bar(self, shown, screen):
            seen.append((shown.done, shown.total, shown.whole))
            return super().bar(shown, screen)

    make_fit(
        max_steps=4, accumulate_grad_batches=3, callbacks=[Seconds(clock, 1.0, 0.0), Looking(console=terminal)]
    ).run(scripted(), batches * 2)
    assert seen[0] == (0, 3, "step 0/4")
    assert seen[3] == (1, 3, "step 1/4")
    assert seen[-1] == (1, 1, "step 4/4")


@pytest.mark.parametrize(
    ("settings", "steps", "batches_done"),
    [
        # Epochs of 3 batches in windows of 2: two steps, of 2 batches and of 1. Every batch takes 1 s.
        ({"max_epochs": 4, "accumulate_grad_batches": 2}, 8, 12),
        ({"max_steps": 7, "accumulate_grad_batches": 2}, 7, 11),
        ({"max_steps": 8, "max_epochs": 100, "accumulate_grad_batches": 2}, 8, 12),
        # Windows of 1, 2 and 3 batches: 3, 2 and 1 steps.
        ({"max_epochs": 3, "accumulate_grad_batches": {0: 1, 1: 2, 2: 3}}, 6, 9),
        ({"max_steps": 4, "accumulate_grad_batches": {0: 1, 1: 2, 2: 3}}, 4, 5),
    ],
)
def test_short_windows_are_counted(make_fit, scripted, batches, terminal, clock, settings, steps, batches_done):
    totals, times = [], []

    class Looking(RichProgressBar):
        def bar(self, shown, screen):
            totals.append(shown.whole.rpartition("/")[2])
            times.append((clock.now, shown.eta_s))
            return super().bar(shown, screen)

    class Total(Callback):
        def on_train_start(self, run, module):
            assert run.total_steps == steps

    callbacks = [Seconds(clock, 1.0, 0.0), Looking(console=terminal), Total()]
    make_fit(**settings, callbacks=callbacks).run(scripted(), batches[:3])
    assert set(totals) == {str(steps)}
    assert {now + eta for now, eta in times if eta is not None} == {float(batches_done)}


def test_a_stream_without_length(make_fit, scripted, terminal, clock):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(5, 1))

    seen = []

    class Looking(RichProgressBar):
        def bar(self, shown, screen):
            seen.append(super().bar(shown, screen))
            return seen[-1]

    make_fit(max_epochs=2, callbacks=[Seconds(clock, 1.0, 0.0), Looking(console=terminal)]).run(
        scripted(), torch.utils.data.DataLoader(Stream())
    )
    assert seen[3] == "epoch 0/1  3 steps  step 3  1.0 step/s  0:03 elapsed  ETA -:--"
    assert "step 8/10" in seen[9]  # the second epoch is taken to be as long as the first


def test_the_line_of_an_epoch_has_the_metrics_of_that_epoch(make_fit, scripted, batches, pipe):
    class Means(scripted):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(self.current_epoch), prog_bar=True, on_step=False, on_epoch=True)
            return (self.weight * batch).mean()

    make_fit(max_epochs=3, callbacks=[RichProgressBar(console=pipe)]).run(Means(), batches)
    assert re.findall(r"mean=(\S+)", pipe.file.getvalue()) == ["0", "1", "2"]


@pytest.mark.parametrize("interval", [50, 0, 3, 1])
def test_an_epochs_line_has_values_of_that_epoch_whenever_they_are_logged(make_fit, scripted, batches, pipe, interval):
    """The weight before step n is 1 - n. What an epoch has not logged or validated is left out."""

    class Odd(scripted):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 1:
                self.log("odd", 7.0, prog_bar=True)
            self.log("last", self.weight.detach()[0].clone(), prog_bar=True)
            return (self.weight * batch).mean()

        def validation_step(self, batch, batch_idx):
            self.log("score", float(self.current_epoch), prog_bar=True)

    bar = RichProgressBar(console=pipe)
    result = make_fit(max_epochs=4, val_every="2 epochs", log_every_n_steps=interval, callbacks=[bar]).run(
        Odd(), batches, batches
    )
    lines = [re.split("step/s, |s/step, ", line)[1] for line in pipe.file.getvalue().splitlines()]
    lines = [dict(item.split("=") for item in line.split(", ")) for line in lines]
    assert lines == [
        {"last": "-3"},
        {"last": "-7", "odd": "7", "score": "1"},
        {"last": "-11"},
        {"last": "-15", "score": "3"},
    ]
    assert result.metrics == {"last": -15.0, "odd": 7.0, "score": 3.0}


def test_a_resumed_run_goes_on_counting(make_fit, scripted, batches, pipe, tmp_path):
    class Stops(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            if run.step == 6:
                run.save_checkpoint()
                run.stop("enough")

    make_fit(max_epochs=3, callbacks=[Stops()]).run(scripted(), batches)
    make_fit(max_epochs=3, callbacks=[RichProgressBar(console=pipe)]).run(scripted(), batches, resume="last")
    assert re.findall(r"epoch (\d)/2: step (\d+)", pipe.file.getvalue()) == [("1", "8"), ("2", "12")]


@pytest.mark.parametrize("callback", [RichProgressBar, TQDMProgressBar, ModelSummary])
def test_random_numbers_of_the_training_stay_the_same(make_fit, scripted, batches, monkeypatch, callback):
    """``rich`` draws some when it is imported, which only the main process does."""

    class Draws(scripted):
        def training_step(self, batch, batch_idx):
            drawn.append(random.random())
            return super().training_step(batch, batch_idx)

    found = []
    for callbacks in ([], [callback()]):
        drawn = []
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
                patch.delitem(sys.modules, name)
            make_fit(max_epochs=2, seed=1, callbacks=callbacks).run(Draws([1.0]), batches, batches)
        found.append(drawn)
    assert found[0] == found[1][-8:]  # the summary calls the step once more, before


def test_a_pipe_gets_the_folder_and_the_checkpoint_once(make_fit, scripted, batches, pipe, tmp_path, caplog):
    def lines(resume=None, level=logging.WARNING):
        pipe.file.truncate(0)
        pipe.file.seek(0)
        with caplog.at_level(level, "engine"):
            make_fit(max_epochs=1, callbacks=[ModelCheckpoint(), RichProgressBar(console=pipe)]).run(
                scripted(), batches, resume=resume
            )
        return [line for line in pipe.file.getvalue().splitlines() if not line.startswith("epoch ")]

    assert lines() == [f"this run writes into {tmp_path}"]
    checkpoint = tmp_path / "checkpoints" / "step=00000004"
    assert lines("last") == [f"resumed from {checkpoint}: epoch 0, step 4", f"this run writes into {tmp_path}"]
    assert lines("last", logging.INFO) == []  # the log has them
    assert f"resumed from {checkpoint}: epoch 0, step 4" in caplog.messages


def test_all_places_number_the_last_of_two_epochs_1(make_fit, scripted, batches, pipe, caplog, tmp_path):
    caplog.set_level(logging.INFO, "engine")
    for bar in ([RichProgressBar(console=pipe)], []):
        result = make_fit(
            max_epochs=2,
            log_every_n_steps=1,
            callbacks=[CSVLogger(), ModelCheckpoint(), *bar],
            root_dir=tmp_path / "run",
        ).run(scripted([1.0]), batches, batches)
        (*_, last) = csv.DictReader(io.StringIO((result.folder / "metrics.csv").read_text()))
        assert last["epoch"] == "1"
        (entry,) = entries(result.last_checkpoint)
        assert (entry["step"], entry["epoch"]) == (8, 1)
        assert str(result).startswith("completed (max_epochs=2 reached): 2 epochs, 8 steps")
        assert result.epoch == 2  # finished ones: a count
    assert pipe.file.getvalue().splitlines()[-1].startswith("epoch 1/1: step 8, ")
    assert "epoch 1 step 8: score=1" in [record.getMessage() for record in caplog.records]


def test_what_is_shown_can_be_chosen(make_fit, scripted, batches, pipe):
    class Chosen(RichProgressBar):
        def get_metrics(self, run, module):
            return {"lr": run.optimizers[0].param_groups[0]["lr"], "note": "a\nb"}

    make_fit(max_epochs=1, callbacks=[Chosen(console=pipe)]).run(scripted(), batches)
    assert pipe.file.getvalue().endswith(", lr=1, note=a\\nb\n")


def test_a_run_without_a_bar_logs_its_progress(make_fit, scripted, batches, caplog):
    """Also with a logger; a bar replaces these lines."""
    caplog.set_level(logging.INFO, "engine")
    make_fit(max_epochs=1, callbacks=[CSVLogger()]).run(scripted(), batches)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch")]
    assert said == ["epoch 0 step 1: train/weight=0", "epoch 0 step 4: train/weight=-3"]
    caplog.clear()
    make_fit(max_epochs=1, callbacks=[CSVLogger(), RichProgressBar(console=Console(file=io.StringIO()))]).run(
        scripted(), batches
    )
    assert not [record for record in caplog.records if "step" in record.getMessage()]


def test_a_reader_that_is_gone_does_not_end_the_run(make_fit, scripted, batches, caplog):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    result = make_fit(max_epochs=2, callbacks=[RichProgressBar(console=Console(file=Gone()))]).run(scripted(), batches)
    assert result.step == 8
    assert caplog.text == ""


def test_a_stream_without_its_characters(make_fit, scripted, batches):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    make_fit(max_epochs=1, callbacks=[RichProgressBar(console=Console(file=file, force_terminal=True, width=90))]).run(
        scripted(), batches
    )
    file.flush()
    text = file.buffer.getvalue().decode()
    assert "----------" in text
    assert "?" not in text


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("rate", [0, -1, 11])
def test_wrong_rate(bar, rate):
    with pytest.raises(ValueError, match="at most 10 Hz"):
        bar(refresh_rate=rate)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        bar(interval_s=0)


def test_lightnings_hooks_of_a_bar_are_refused():
    with pytest.raises(TypeError, match=r"init_train_tqdm would never be called: override bar"):
        type("Mine", (TQDMProgressBar,), {"init_train_tqdm": lambda self: None})


def test_figures_as_text():
    assert [duration(s) for s in (0, 59.6, 3600, 86400 * 2 + 3661, None)] == [
        "0:00",
        "1:00",
        "1:00:00",
        "2d 01:01",
        "-:--",
    ]
    assert [speed(r, "step") for r in (12.34, 0.25, 12345.6, None)] == [
        "12.3 step/s",
        "4.0 s/step",
        "12346 step/s",
        "- step/s",
    ]
    assert [number(v) for v in (0.123456, 1e-7, 3, "text")] == ["0.1235", "1e-07", "3", "text"]


def test_metrics_are_wrapped():
    items = ["loss=0.5", "accuracy=0.25", "x" * 30 + "=1", "幅=2"]
    assert wrap_items(items, 20, 10) == ["loss=0.5", "accuracy=0.25", "x" * 17 + "…=1", "幅=2"]
    assert wrap_items(items, 23, 2) == ["loss=0.5  accuracy=0.25", "… 2 more"]
    assert wrap_items([], 20, 10) == []


NOTEBOOK = """
import torch
import callbacks
from engine import Fit, TrainModule, launch

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        loss = (self.weight * batch).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("mean", batch.mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

def main(bar):
    fit = Fit(max_epochs=2, accelerator="cpu", root_dir="runs", callbacks=[getattr(callbacks, bar)()])
    module = Model()
    fit.run(module, [torch.ones(2, 1)] * 20)
    fit.test(module, [torch.ones(2, 1)] * 20)
"""


@pytest.mark.slow
def test_a_notebook(tmp_path, monkeypatch):
    """The cell keeps the last state of the bar; processes forked from it write lines, which appear in it."""
    nbformat, nbconvert = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert.preprocessors")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    calls = [
        "main('RichProgressBar')",
        "main('TQDMProgressBar')",
        "launch.notebook(main, 'RichProgressBar', num_processes=2);",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (NOTEBOOK, *calls)])
    nbconvert.ExecutePreprocessor(timeout=300).preprocess(book, {"metadata": {"path": str(tmp_path)}})
    rich, tqdm, forked = (cell.outputs for cell in book.cells[1:])
    for outputs, bar in ((rich, "epoch 1/1  ━━"), (tqdm, "epoch 1/1: 100%|")):
        training, testing = (each.data["text/html"] for each in outputs if each.output_type == "display_data")
        assert bar in training
        assert "20/20" in training
        assert "loss=-39" in training
        assert "20/20" in testing
    for outputs in (rich, tqdm, forked):
        text = "".join(each.text for each in outputs if each.output_type == "stream")
        steps = [20, 40] if outputs is not forked else [10, 20]
        assert [int(step) for step in re.findall(r"epoch \d/1: step (\d+)", text)] == steps
        assert len(re.findall(r"mean +1\b", text)) == 1
    assert not [each for each in forked if each.output_type == "display_data"], json.dumps(forked)
