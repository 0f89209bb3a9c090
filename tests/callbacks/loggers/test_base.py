"""What all loggers share, with loggers that fail, hang, and are killed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from models import Weight, fit, ones
from processes import clean_environment, run_ranks

from callbacks import ModelCheckpoint
from callbacks.loggers.base import Logger, Moment
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


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_tracker_that_is_gone_stops_nothing(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    class Gone(Notes):
        def scalars(self, values: Mapping[str, float], at: Moment) -> None:
            if how == "fails":
                raise ConnectionError("away")
            threading.Event().wait(600)

    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, "engine"):
        gone = Gone(retries=0, waiting=2, patience_s=0.5)
        result = fit(tmp_path, max_steps=20, log_every_n_steps=1, callbacks=gone).run(Logs(), ones(20))
    assert (result.status, result.step) == ("completed", 20)
    assert time.monotonic() - begun < 300
    said = [record.getMessage() for record in caplog.records]
    if how == "fails":
        assert said == ["Gone failed; the run continues without it: away"]
    else:
        assert said == [
            "Gone does not keep up: values are left out",
            "Gone did not answer within 0.5 s: what it had not sent is lost",
        ]


def test_what_cannot_be_opened_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    class Closed(Notes):
        def open(self, run: Run) -> None:
            raise ImportError("pip install tracker")

    module = Logs()
    with pytest.raises(ImportError, match="pip install tracker"):
        fit(tmp_path, callbacks=Closed()).run(module, ones(2))
    assert not module.losses


KILLED = """
import os, sys
from pathlib import Path
root, kill = Path(sys.argv[1]), int(sys.argv[2])
from callbacks import ModelCheckpoint
from callbacks.loggers.base import Logger
from engine import Callback
from models import Weight, fit, ones

class Lines(Logger):
    def scalars(self, values, at):
        with (root / "lines").open("a") as file:
            print(at.step, *values, file=file)

class Logs(Weight):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)

class Kills(Callback):
    def on_train_batch_end(self, run, *args):
        if run.step == kill:
            while not (root / "lines").exists() or f"{kill - 1} val" not in (root / "lines").read_text():
                pass
            os._exit(9)

checkpoint = ModelCheckpoint(every="3 steps", asynchronous=False)
fit(root, max_steps=9, log_every_n_steps=1, val_every="1 steps", callbacks=[Lines(), Kills(), checkpoint]).run(
    Logs(), ones(9), ones(1), resume="auto"
)
"""


def test_a_killed_and_resumed_run_has_no_line_twice_and_none_missing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    environment = clean_environment(
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
    )
    for kill in (5, 8, -1):
        command = [sys.executable, str(script), str(tmp_path), str(kill)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == (9 if kill > 0 else 0), done.stderr
    lines = (tmp_path / "lines").read_text().splitlines()
    assert lines == [f"{step} {name}" for step in range(1, 10) for name in ("loss", "val")]


def test_only_the_main_process_opens(tmp_path: Path) -> None:
    script = """
import sys
from callbacks.loggers.base import Logger
from models import Weight, fit, ones

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
