"""Names of users and of files reach terminals and pages as text: nothing in them is obeyed, and nothing is lost."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from callbacks import (
    CSVLogger,
    JSONLLogger,
    ModelCheckpoint,
    ModelSummary,
    Report,
    RichProgressBar,
    SimpleProfiler,
    TensorBoardLogger,
    TQDMProgressBar,
    write_report,
)
from callbacks.progress.screen import Notebook
from engine import Callback, Fit, Run, TrainModule, terminal_text
from engine.cli.main import main
from engine.cli.terminal import complain
from engine.utils.log import logger, warn_once

NAME = "a[/cat] [red]:cat:\x1b[2J\x9b31m\u202e<b>&\nforged"
"""Markup and an emoji of rich, ESC, C1, a bidi control, HTML, and a line end."""
SHOWN = r"a[/cat] [red]:cat:\x1b[2J\x9b31m\u202e<b>&\nforged"
SURROGATE = "half\ud800"


class Hostile(TrainModule):
    """Every name that a user may choose is :data:`NAME`."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.Linear(1, 1, bias=False))

    def forward(self, batch: Any) -> Any:
        return self.get_submodule(NAME)(batch).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch)
        self.log(NAME, loss, prog_bar=True)
        self.log(SURROGATE, 1.0)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(f"val {NAME}", self(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Hostile.__name__ = Hostile.__qualname__ = NAME


def batches() -> DataLoader[Any]:
    return DataLoader(torch.ones(4, 1), 2)  # type: ignore[arg-type]


class Stateful(Callback):
    """Has a hostile key in checkpoints."""

    @property
    def state_key(self) -> str:
        return NAME

    def state_dict(self) -> dict[str, Any]:
        return {NAME: 1}

    def on_save_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        checkpoint[NAME] = 1


def check(text: str, *, present: bool = True, own: Callable[[str], str] = lambda text: text) -> None:
    """Nothing of :data:`NAME` is obeyed; ``own`` removes our own escape sequences."""
    assert SHOWN in text or not present, text
    assert "forged" not in [line.strip()[:6] for line in text.splitlines()]
    rest = own(text).replace("\n", "")
    assert rest.isprintable(), ascii(rest)


def without_color(text: str) -> str:
    return re.sub(r"\x1b(?:\[[0-9;]*[mKHJrAC]|[78DM])", "", text.replace("\x1b[2J", "obeyed\x07"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with hostile names everywhere, and all that writes them."""
    watching = [CSVLogger(), JSONLLogger(), TensorBoardLogger(), Report(), ModelCheckpoint(every=1, save_top_k=-1)]
    fit = Fit(max_epochs=2, root_dir=tmp_path / "run", log_every_n_steps=1, callbacks=[*watching, Stateful()])
    fit.run(Hostile(), batches(), batches())
    return tmp_path / "run"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What the library's logger writes to a terminal."""
    handler = logging.StreamHandler(io.StringIO())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_terminal_text_shows_what_a_terminal_would_obey() -> None:
    assert terminal_text("naïve 漢字 🙂\n") == "naïve 漢字 🙂\n"
    assert terminal_text("a\x1b[2J\x07\t\x9b\u202e\u200b\ud800\r") == r"a\x1b[2J\x07\t\x9b\u202e\u200b\ud800\r"
    assert terminal_text("a\nb", one_line=True) == r"a\nb"
    assert terminal_text(NAME, one_line=True) == SHOWN
    assert terminal_text(3) == "3"
    assert terminal_text("at ftp://me:pass@word@host/a, by me@host") == "at ftp://me:***@host/a, by me@host"


def test_the_log(stream: io.StringIO, tmp_path: Path) -> None:
    result = Fit(max_epochs=1, root_dir=tmp_path, log_every_n_steps=1).run(Hostile(), batches(), batches())
    logger.warning("%s is not %s", "x\x1b[2J", 1)
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        logger.exception("it failed")
    text = stream.getvalue()
    check(text)
    assert r"x\x1b[2J is not 1" in text
    assert r"ValueError: bad\x1b[2J" in text
    check(str(result))


def test_messages_about_a_checkpoint(stream: io.StringIO, run: Path) -> None:
    Fit(max_epochs=3, root_dir=run, callbacks=[]).run(Hostile(), batches(), resume="last")
    assert "which is not restored" in stream.getvalue()
    check(stream.getvalue(), present=False)


@pytest.mark.parametrize("kind", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bars_and_tables(kind: Any, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, height=40)
    fit = Fit(max_epochs=2, root_dir=tmp_path, callbacks=[kind(console=console)])
    fit.run(Hostile(), batches(), batches())
    fit.validate(Hostile(), batches())
    check(file.getvalue(), own=without_color)


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[Any] = []
    monkeypatch.setattr(display, "display", lambda html, display_id: shown.append(html.data))
    Notebook().draw(["<b>&"])
    assert shown == ['<pre style="white-space: pre-wrap">&lt;b&gt;&amp;</pre>']


def test_the_summary_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Fit(max_epochs=1, root_dir=tmp_path, callbacks=[ModelSummary()]).run(Hostile(), batches())
    check(capsys.readouterr().out)


def test_the_table_of_a_profiler() -> None:
    profiler = SimpleProfiler()
    profiler.durations[f"[TrainModule]{NAME}.on_train_start"] = (1, 1.0)
    check(profiler.summary())


@pytest.mark.parametrize("command", ["report", "migrate", "checkpoint list", "run", "replay", "plan", "env", "config"])
def test_words_of_the_command_line_in_errors(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's ``*`` makes words of the names of files."""
    line = NAME.replace("\n", "")  # a message may have several lines
    for word in (f"--{line}", line, f"-{line}", f"--{line}=\x1b]0;title\x07"):
        with contextlib.suppress(SystemExit):
            main([*command.split(), word])
        for text in capsys.readouterr():
            assert text.replace("\n", "").isprintable(), ascii(text)


def test_warnings() -> None:
    with pytest.warns(UserWarning, match="there") as caught:
        warn_once(f"{NAME} is there")
    assert terminal_text(NAME) in str(caught[0].message)


def test_the_commands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    here = [f"{__file__}:Hostile", "--data", f"{__file__}:batches"]
    saved = str(run / "checkpoints" / "step=00000002")
    hostile = tmp_path / "b\x1b[2J\u202e.py"
    hostile.write_text("import lightning\n")
    commands = {
        "validate": ["validate", *here, "--checkpoint", saved],
        "run": ["run", *here, "--set", "max_epochs=1", "log_every_n_steps=1"],
        "checkpoint list": ["checkpoint", "list", str(run)],
        "checkpoint show": ["checkpoint", "show", "--tensors", saved],
        "plan": ["plan", *here, "--world-size", "2", "--device", "cpu,1GiB"],
        "replay": ["replay", str(run), "--step", "2", "--per-layer", "--target", here[0], *here[1:]],
    }
    for name, command in commands.items():
        assert main(command) in (0, 3), name
        out, err = capsys.readouterr()
        check(out)
        check(err, present=False)
    for command in (
        ["migrate", str(hostile)],
        ["config", "--check", str(hostile)],
        ["report", str(run), "--out", f"{NAME[:-7]}/x.html"],
    ):
        main(command)
        out, err = capsys.readouterr()
        check(out, present=False)
        check(err, present=False)
    complain(f"there is no {NAME}")
    assert capsys.readouterr().err == "fit: error: there is no " + SHOWN.replace(r"\n", "\n") + "\n"


def test_pages(run: Path, tmp_path: Path) -> None:
    pages = [write_report([run], tmp_path / "one.html").read_text()]
    plan = Fit().plan(Hostile(), batches(), world_size=2, device="cpu,1GiB")
    plan.write_page(tmp_path / "plan.html")
    pages.append((tmp_path / "plan.html").read_text())
    for page in pages:
        assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in pages[1]


def test_files_keep_every_row_and_every_name(run: Path) -> None:
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row[NAME]]
    assert [row["step"] for row in steps] == ["1", "2", "3", "4"]  # a name with half a character loses none
    assert {row[r"half\ud800"] for row in steps} == {"1.0"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(NAME in line.get("values", {}) for line in lines) == 4
