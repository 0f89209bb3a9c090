"""``Report`` on real runs: what its page has, after a run that ends, fails, is killed, is resumed."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.browser import Page, series
from support.ranks import run_ranks
from torch.utils.data import DataLoader

from callbacks import CSVLogger, ModelCheckpoint, Report, write_report
from callbacks.report.record import events
from callbacks.report.runs import read_run

LOST = 7
"""The step at which the job is killed; it saves every 3 steps."""
KILLED = """
import os, signal, sys
import torch
from callbacks import ModelCheckpoint, Report
from engine import Callback, Fit, TrainModule

class Falling(TrainModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.log("train/weight", self.weight.detach()[0].clone())
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

class Kill(Callback):
    def on_log(self, run, module, metrics, step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

fit = Fit(accelerator="cpu", max_epochs=2, log_every_n_steps=1, root_dir=sys.argv[1],
          callbacks=[Report(), ModelCheckpoint(every="3 steps"), Kill()])
fit.run(Falling(), [torch.ones(2, 1) for _ in range(16)])
"""


@pytest.fixture
def falling(scripted):
    """Its gradient is 1: the weight before step n, which it logs, is -(n - 1)."""

    class Falling(scripted):
        def training_step(self, batch, batch_idx):
            self.log("train/weight", self.weight.detach()[0].clone())
            return (self.weight * batch).mean()

    return Falling


def test_the_page_of_a_run(make_fit, falling, batches, tmp_path):
    callbacks = [Report(), ModelCheckpoint(every="1 epochs", monitor="score")]
    fit = make_fit(max_epochs=2, log_every_n_steps=2, callbacks=callbacks, gradient_clip_val=3.0)
    result = fit.run(falling([0.25, 0.125]), batches, batches)
    page = Page(tmp_path / "report.html")
    steps, values = series(tmp_path / "report.html", "train/weight")
    assert steps == [1, 2, 4, 6, 8]
    assert values == [-(step - 1.0) for step in steps]
    assert series(tmp_path / "report.html", "score") == ([4, 8], [0.25, 0.125])
    assert series(tmp_path / "report.html", "SGD") == (steps, [1.0] * 5)  # the learning rate
    assert series(tmp_path / "report.html", "steps per second")[0] == [2, 4, 6, 8]
    speed = zip(
        *(series(tmp_path / "report.html", f"{what} per second")[1] for what in ("samples", "steps")), strict=True
    )
    assert [samples / steps for samples, steps in speed] == pytest.approx([2.0] * 4)  # samples of a step
    assert ["score", "0.125", "0.125", "8", "0.25", "4"] in page.tables["Values of each metric"]
    assert ["gradient_clip_val", "3.0", "code"] in page.tables["Settings"]
    assert [row[0] for row in page.tables["Checkpoints that were kept"][1:]] == [result.best_checkpoint.name]
    times = {row[0]: row[1] for row in page.tables["Time of each phase"][1:]}
    assert {"training steps", "validation", "checkpoints", "in all"} <= times.keys()
    assert "completed max_epochs=2 reached" in page.text


def test_stages_of_a_training_are_marked(make_fit, falling, tmp_path):
    """Samples 1 to 10 in steps of 2, then in steps of 4; the training resumes within the second stage, which stays where it began."""
    settings = {"log_every_n_steps": 3, "global_batch_size": {0: 2, "10 samples": 4}, "max_epochs": 2}
    data = DataLoader(torch.ones(14, 1), batch_size=2)
    for limit in ({"max_steps": 6}, {}):
        fit = make_fit(**settings, **limit, callbacks=[Report(), ModelCheckpoint()])
        fit.run(falling(), data, resume="last" if not limit else None)
    assert [event["step"] for event in events(tmp_path / "report.jsonl") if event["event"] == "stage"] == [5, 6]
    page = Page(tmp_path / "report.html")
    (stage,) = page.data["stages"]
    assert (stage["run"], stage["x"], stage["text"]) == (0, 5, "batch size 4")
    steps, _ = series(tmp_path / "report.html", "train/weight")
    seconds = dict(zip(steps, page.series[tmp_path.name, "train/weight"][1], strict=True))
    assert seconds[3] < stage["t"] < seconds[6]
    assert page.tables["Stages of the training"] == [["after step", "stage", "from here on"], ["5", "batch size", "4"]]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("scores", [[0.1, 0.3, 0.2], [0.3, 0.1, 0.2], [0.3, 0.2, 0.1], [0.1, 0.1, 0.1]])
def test_the_best_checkpoint_is_marked_wherever_it_comes(
    make_fit, falling, batches, tmp_path, monkeypatch, scores, asynchronous, mode
):
    checkpoint = ModelCheckpoint("1 epochs", "score", mode, save_top_k=-1, asynchronous=asynchronous)
    result = make_fit(max_epochs=3, callbacks=[Report(), checkpoint]).run(falling(scores), batches, batches)
    expected = [str(path) == str(result.best_checkpoint) for path in checkpoint.best_k_models]
    assert sorted(expected) == [False, False, True]
    marked = [each["best"] for each in read_run(tmp_path).checkpoints]
    best = min(range(3), key=lambda i: scores[i] if mode == "min" else -scores[i])
    assert marked == [index == best for index in range(3)]
    # Where manifests cannot be read, at a URL for example, the record has it.
    monkeypatch.setattr("callbacks.report.runs._best_by_score", lambda manifests: "")
    assert [each["best"] for each in read_run(tmp_path).checkpoints] == marked


def test_a_row_opens_no_file(make_fit, falling, batches, tmp_path):
    """To open one takes 12 us, as long as all else that a row needs."""
    steps, opened = [], []

    def watch(frame, event, arg):
        if event == "c_call" and arg.__name__ == "open":
            opened.append(frame.f_code.co_filename)

    class Watched(Report):
        def on_log(self, run, module, metrics, step):
            earlier = sys.getprofile()
            sys.setprofile(watch)
            super().on_log(run, module, metrics, step)
            sys.setprofile(earlier)
            steps.append(step)

    make_fit(max_epochs=1, log_every_n_steps=1, callbacks=[Watched()]).run(falling(), batches)
    assert steps == [1, 2, 3, 4]
    assert opened == []
    if Path("/proc/self/statm").exists():
        assert min(series(tmp_path / "report.html", "main process")[1]) > 1 << 20


def test_secrets_are_not_recorded(make_fit, falling, batches, tmp_path):
    class Secretive(falling):
        def __init__(self, width, api_key):
            super().__init__()
            self.save_hyperparameters()

    make_fit(callbacks=Report()).run(Secretive(64, "open sesame"), batches)
    settings = Page(tmp_path / "report.html").tables["Settings"]
    assert ["width", "64", "hyperparameter"] in settings
    assert ["api_key", "***", "hyperparameter"] in settings
    record = tmp_path / "report.jsonl"
    assert "sesame" not in record.read_text() + (tmp_path / "report.html").read_text()
    record.write_text(
        record.read_text().replace("***", "open sesame")
    )  # as a version that hid less would have recorded it
    assert "sesame" not in write_report([tmp_path]).read_text()


def test_an_evaluation_adds_its_values(make_fit, scripted, batches, tmp_path):
    fit = make_fit(log_every_n_steps=2, callbacks=Report())
    module = scripted()
    fit.run(module, batches)
    fit.test(module, [torch.full((2, 1), 3.0)])
    page = Page(tmp_path / "report.html")
    assert series(tmp_path / "report.html", "test/mean") == ([4], [3.0])
    assert "completed" in page.text


def test_an_error_ends_with_a_page_that_shows_it_as_text(make_fit, falling, batches, tmp_path):
    class Failing(falling):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("<b>no</b> from https://host/data?sig=sesame")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="<b>no</b>"):
        make_fit(log_every_n_steps=1, callbacks=Report()).run(Failing(), batches)
    page = Page(tmp_path / "report.html")
    assert "failed RuntimeError: <b>no</b> from https://host/data?sig=***" in page.text
    assert "sesame" not in (tmp_path / "report.jsonl").read_text()
    assert "b" not in {tag for tag, _ in page.tags}
    assert series(tmp_path / "report.html", "train/weight") == ([1, 2], [0, -1])


@pytest.mark.slow
def test_a_killed_job_of_two_ranks_and_its_resume_on_one(make_fit, falling, tmp_path):
    ran = run_ranks(KILLED, 2, tmp_path, check=False)
    assert [each.returncode for each in ran] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "report.html").exists()
    page = write_report([tmp_path])
    assert page == tmp_path / "report.html"
    assert series(page, "train/weight") == (list(range(1, LOST + 1)), [-float(n) for n in range(LOST)])
    found = Page(page)
    assert "no end recorded" in found.text
    assert "not measured (the run was killed, or is running)" in str(found.tables["Time of each phase"])
    saved = [row[0] for row in found.tables["Checkpoints that were kept"][1:]]
    assert saved[-1] in ("step=00000003", "step=00000006")  # of an unfinished save nothing is shown
    assert saved == sorted(path.name for path in (tmp_path / "checkpoints").glob("step=*"))

    batches = [torch.ones(2, 1) for _ in range(16)]
    fit = make_fit(max_epochs=2, log_every_n_steps=1, callbacks=[Report(), ModelCheckpoint(every="3 steps")])
    result = fit.run(falling(), batches, resume="last")
    assert result.folder == tmp_path
    starts = [event for event in events(tmp_path / "report.jsonl") if event["event"] == "start"]
    assert [start["step"] for start in starts] == [0, int(saved[-1].removeprefix("step="))]
    steps, values = series(page, "train/weight")
    assert steps == list(range(1, result.step + 1))
    assert values == [-(step - 1.0) for step in steps]
    assert "resumedonce" in Page(page).text


def test_what_cannot_be_written_does_not_end_the_run(make_fit, scripted, batches, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR, "engine"):
        callbacks = [Report(tmp_path / "file" / "page.html"), CSVLogger()]
        result = make_fit(callbacks=callbacks, root_dir=tmp_path / "run").run(scripted(), batches)
    assert result.status == "completed"
    assert "Report.teardown failed" in caplog.text


def test_wrong_arguments_are_errors_before_the_run(make_fit, scripted, batches, tmp_path):
    with pytest.raises(
        ValueError, match=r"Report\(path='page.txt'\): it must be the path of a file that ends in \.html"
    ):
        Report("page.txt")
    with pytest.raises(ValueError, match="a run can have one Report"):
        make_fit(callbacks=[Report(), Report()]).run(scripted(), batches)
    with pytest.raises(ValueError, match="give a folder"):
        write_report([])
    with pytest.raises(FileNotFoundError, match=r"has no run with a report\.jsonl"):
        write_report([tmp_path])
