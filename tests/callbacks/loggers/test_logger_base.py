"""What all loggers share, with loggers that fail, hang, and are killed."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint
from callbacks.loggers import PlainLogger
from callbacks.loggers.base import Logger, Moment
from callbacks.loggers.sender import Sender
from engine import Run


class Notes(Logger):
    """Keeps what is sent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent: list[Any] = []

    def open(self, run: Run) -> None:
        self.sent.append(("open", run.stage))

    def scalars(self, values: Mapping[str, float], at: Moment) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.sent.append((at.step, at.epoch, *values))

    def close(self, status: str) -> None:
        self.sent.append(status)


class Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


def test_in_order_and_to_the_end(tmp_path: Path) -> None:
    notes = Notes()
    fit(tmp_path, max_epochs=2, log_every_n_steps=1, callbacks=notes).run(Logs(), ones(2), ones(1))
    assert notes.sent == [
        ("open", "fit"),
        *((1, 0, "loss"), (2, 0, "loss"), (2, 0, "val")),
        *((3, 1, "loss"), (4, 1, "loss"), (4, 1, "val")),
        "completed",
    ]


def test_an_evaluation_is_logged_at_the_checkpoints_step(tmp_path: Path) -> None:
    notes = Notes()
    trainer = fit(tmp_path, max_steps=2, log_every_n_steps=1, callbacks=[notes, ModelCheckpoint()])
    trainer.run(Logs(), ones(2))
    notes.sent.clear()
    trainer.validate(Logs(), ones(1), checkpoint="last")
    trainer.validate(Logs(), ones(1), checkpoint="last")
    assert notes.sent == [("open", "validate"), (2, 0, "val"), "completed"] * 2


def test_a_short_failure_is_repeated(tmp_path: Path) -> None:
    class Flaky(Notes):
        failures = 2

        def scalars(self, values: Mapping[str, float], at: Moment) -> None:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("away")
            super().scalars(values, at)

    flaky = Flaky()
    fit(tmp_path, max_steps=2, log_every_n_steps=1, callbacks=flaky).run(Logs(), ones(2))
    assert [each[0] for each in flaky.sent[1:-1]] == [1, 2]


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_ends_a_loggers_thread_is_told(
    tmp_path: Path, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Dies(Notes):
        def scalars(self, values: Mapping[str, float], at: Moment) -> None:
            if at.step == 2:
                raise kind("away")
            super().scalars(values, at)

    dies = Dies(retries=0)
    result = fit(tmp_path, max_steps=4, log_every_n_steps=1, callbacks=dies).run(Logs(), ones(4))
    assert (result.status, result.step) == ("completed", 4)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["Dies failed; the run continues without it: away"]
    assert dies.sent == [("open", "fit"), (1, 0, "loss"), "completed"]


def test_an_error_of_the_thread_itself_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Sender, item: Any) -> bool:
        raise SystemExit("planted")

    monkeypatch.setattr(Sender, "_try_call", fails)
    assert fit(tmp_path, max_steps=4, log_every_n_steps=1, callbacks=Notes()).run(Logs(), ones(4)).step == 4
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("Notes failed in its thread; the run continues without it, and what waited (")


def test_a_plain_logger_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(PlainLogger):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            self.calls.append(step)
            raise ZeroDivisionError("as planned")

        def finalize(self, status: str) -> None:
            self.calls.append(status)

    fails = Fails()
    result = fit(tmp_path, max_steps=4, log_every_n_steps=1, callbacks=fails).run(Logs(), ones(4))
    assert (result.status, result.step, fails.calls) == ("completed", 4, [1, "success"])
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith("Fails.on_log failed; the run continues without Fails")
    assert record.exc_info is not None


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_tracker_that_is_gone_stops_nothing(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Notes):
        def scalars(self, values: Mapping[str, float], at: Moment) -> None:
            if how == "fails":
                raise ConnectionError("away")
            threading.Event().wait(10**6)  # longer than the test session

    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, "engine"):
        gone = Gone(retries=0, waiting=2 if how == "hangs" else 100, patience_s=0.5)
        result = fit(tmp_path, max_steps=20, log_every_n_steps=1, callbacks=gone).run(Logs(), ones(20))
    assert (result.status, result.step) == ("completed", 20)
    assert time.monotonic() - begun < 300
    said = [record.getMessage() for record in caplog.records]
    if how == "fails":
        assert said == ["Gone failed; the run continues without it: away"]
    else:
        assert said == [
            "Gone does not keep up: some values are not sent",
            "Gone did not answer within 0.5 s: values that were not sent yet are lost",
        ]


def test_a_medium_that_cannot_be_sent_is_left_out_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Pictures(Notes):
        takes = frozenset({"text", "artifact"})

        def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
            if value == "0":
                raise TypeError("not a word")
            self.sent.append((at.step, kind, name, value, options))

        def artifact(self, path: Path, name: str, at: Moment) -> None:
            self.sent.append((at.step, path, name))

    class Draws(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_text("word", f"{batch_idx}")
            self.log_artifact("file", tmp_path)
            return super().training_step(batch, batch_idx)

    notes = Pictures()
    fit(tmp_path, max_steps=2, log_every_n_steps=1, callbacks=notes).run(Draws(), ones(2))
    assert notes.sent == [
        ("open", "fit"),
        *((0, tmp_path, "file"), (1, 0, "loss")),
        *((1, "text", "word", "1", {}), (1, tmp_path, "file"), (2, 0, "loss")),
        "completed",
    ]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["Pictures could not send the text 'word' and leaves it out: not a word"]


def test_a_file_logger_writes_values_at_once_and_media_by_a_thread(tmp_path: Path) -> None:
    """Also, values that are logged behind a medium come behind it."""

    class Files(Logger):
        takes = frozenset({"text"})
        threaded = False

        def __init__(self) -> None:
            super().__init__()
            self.sent: list[Any] = []
            self.go = threading.Event()

        def scalars(self, values: Mapping[str, float], at: Moment) -> None:
            self.sent.append((at.step, threading.current_thread() is threading.main_thread()))

        def media(self, kind: str, name: str, value: Any, at: Moment, **options: Any) -> None:
            self.go.wait(300)
            self.sent.append((value, threading.current_thread() is threading.main_thread()))

    class Draws(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                assert files.sent == [(1, True), (2, True)]
                self.log_text("word", "three")
            if batch_idx == 3:
                assert len(files.sent) == 2  # step 3 waits for the word
                files.go.set()
            return super().training_step(batch, batch_idx)

    files = Files()
    fit(tmp_path, max_steps=4, log_every_n_steps=1, callbacks=files).run(Draws(), ones(4))
    assert files.sent[:4] == [(1, True), (2, True), ("three", False), (3, False)]
    assert [step for step, _ in files.sent[4:]] == [4]


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    class Stops(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    notes = Notes()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, log_every_n_steps=1, callbacks=notes).run(Stops(), ones(2))
    assert notes.sent == [("open", "fit"), (1, 0, "loss"), "interrupted"]


def test_an_evaluation_does_not_change_what_was_sent(tmp_path: Path) -> None:
    trainer = fit(
        tmp_path,
        max_steps=4,
        log_every_n_steps=1,
        callbacks=[notes := Notes(), ModelCheckpoint("2 steps", save_top_k=2)],
    )
    result = trainer.run(Logs(), ones(4))
    checkpoint = result.folder / "checkpoints" / "step=00000002"
    trainer.validate(Logs(), ones(1), checkpoint=checkpoint)
    notes.sent.clear()
    trainer.run(Logs(), ones(4), resume=checkpoint)
    assert notes.sent == [("open", "fit"), "completed"]


def test_what_cannot_be_opened_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    class Closed(Notes):
        def open(self, run: Run) -> None:
            raise ImportError("pip install tracker")

    module = Logs()
    with pytest.raises(ImportError, match="pip install tracker"):
        fit(tmp_path, callbacks=Closed()).run(module, ones(2))
    assert not module.losses


KILLED = """
import json, os, signal, sys, threading
from pathlib import Path
root, event, kill, slow, asynchronous = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
from torch.utils.data import DataLoader
from callbacks import ModelCheckpoint
from callbacks.loggers.base import Logger
from engine import Callback
from support.toys import Weight, fit, ones

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Lines(Logger):
    takes = frozenset({"text"})
    def write(self, *words):
        if slow == "stuck" and not go.is_set():
            go.wait(600)
        with (root / "lines").open("a") as file:
            print(*words, file=file)
    def scalars(self, values, at):
        self.write(at.step, at.epoch, *(f"{name}={value:g}" for name, value in values.items()))
        if event == "sending" and at.step == kill:
            die()
    def media(self, kind, name, value, at, **options):
        self.write(at.step, at.epoch, name, value)
    def has(self, values, at):
        written = (root / "lines").open() if (root / "lines").exists() else []
        there = [line.split()[0] + line.split()[2].partition("=")[0] for line in written]
        return str(at.step) + next(iter(values)) in there

go = threading.Event()
lines = Lines(patience_s=300)

class Logs(Weight):
    def training_step(self, batch, batch_idx):
        self.log("loss", float(self.global_step))
        if self.run.step == 4:
            self.log_text("note", "four")
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", float(dataloader_idx))
    def on_validation_epoch_end(self):
        self.log("all", 1.0)

class Kills(Callback):
    seen = 0
    def on_checkpoint_saved(self, run, *args):
        if event == "saved" and run.step >= kill:
            die()
    def on_log(self, run, module, metrics, step):
        self.seen = self.seen + 1 if step == kill else 0
        if event.startswith("log") and step == kill and self.seen == int(event[3:]):
            while slow != "stuck" and lines._sender.waiting():
                pass
            die()
    def on_train_end(self, *args):
        go.set()

data = DataLoader(ones(1)[0], batch_size=1)
checkpoint = ModelCheckpoint(every="3 steps", asynchronous=asynchronous == "asynchronous")
fit(root, max_steps=9, log_every_n_steps=1, val_every="1 steps", callbacks=[lines, Kills(), checkpoint]).run(
    Logs(), ones(9), [data, data], resume="auto"
)
report(True)
"""
WHOLE = [
    line
    for step in range(1, 10)
    for line in (
        *((f"{step} 0 loss={step - 1}",)),
        *((f"{step} 0 val/dataloader_idx_0=0", f"{step} 0 val/dataloader_idx_1=1", f"{step} 0 all=1")),
        *(["4 0 note four"] if step == 4 else []),
    )
]


@pytest.mark.parametrize(
    ("kills", "asynchronous"),
    [
        # At the event of the checkpoint; in the middle of the evaluations of a step that is saved, and of one that is not; while values are sent.
        (["saved 3 quick", "log3 8 quick", "sending 9 quick"], "no"),
        # All values wait for a tracker that does not answer, and are in the checkpoint.
        (["log4 7 stuck", "saved 9 stuck"], "asynchronous"),
    ],
)
def test_a_killed_and_resumed_run_has_no_line_twice_and_none_missing(
    tmp_path: Path, kills: list[str], asynchronous: str
) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + KILLED
    for kill in kills:
        ran = run_ranks(script, 1, tmp_path, *kill.split(), asynchronous, check=False)[0]
        assert ran.returncode == -signal.SIGKILL, ran.stderr
    run_ranks(script, 1, tmp_path, "never", 0, "quick", asynchronous)
    kept, whole = (tmp_path / "lines").read_text().splitlines(), WHOLE
    if (
        asynchronous != "no"
    ):  # checkpoints keep no media: they are written again if the last one before a kill was not complete yet
        kept, whole = ([line for line in lines if "note" not in line] for lines in (kept, whole))
    assert kept == whole


def test_only_the_main_process_opens(tmp_path: Path) -> None:
    script = """
import sys
from callbacks.loggers.base import Logger
from support.toys import Weight, fit, ones

class Opens(Logger):
    opened = False
    def open(self, run):
        self.opened = True

opens = Opens()
fit(sys.argv[1], devices="auto", strategy="ddp", callbacks=opens).run(Weight(), ones(4))
report(opens.opened)
"""
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
    assert [rank.value for rank in run_ranks(path + script, 2, tmp_path)] == [True, False]
