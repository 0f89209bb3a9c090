"""Help is there at once: no command's options need anything heavy. What is heavy is looked for, time is not measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import clean_environment

from engine.cli import main as cli
from engine.cli.object_builder import class_help
from engine.cli.requested_objects import Component
from engine.cli.terminal import STATUSES
from engine.config.settings_file import documentation

HEAVY = ("torch", "numpy", "yaml", "rich", "jsonargparse", "safetensors", "ray", "deepspeed")
SCRIPT = f"""
import argparse, contextlib, importlib, io, sys
from engine.cli import main as cli

def said(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*arguments, "--help"])
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(*arguments, "-", *heavy, "-", out.getvalue().startswith("usage: fit " + " ".join(arguments)))

said()
for command in cli.COMMANDS:
    said(command)
for command in cli.COMMANDS:
    for action in cli.COMMANDS[command].parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                said(command, name)
"""


@pytest.fixture(scope="module")
def lines() -> dict[str, tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=clean_environment(), capture_output=True, text=True, check=True
    )
    return {
        command.strip(): (heavy.strip(), usage.strip())
        for command, heavy, usage in (line.split("-") for line in done.stdout.splitlines())
    }


def test_every_command_has_help(lines: dict[str, tuple[str, str]]) -> None:
    assert lines.keys() >= {"", *cli.COMMANDS, "checkpoint export"}
    assert {command: usage for command, (_, usage) in lines.items() if usage != "True"} == {}


def test_no_help_imports_anything_heavy(lines: dict[str, tuple[str, str]]) -> None:
    assert {command: heavy for command, (heavy, _) in lines.items() if heavy} == {}


def test_exit_statuses_are_documented(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main([])
    assert STATUSES in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--help"])
    assert end.value.code == 0
    assert STATUSES in capsys.readouterr().out


def test_test_alone_is_said_to_be_the_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["test", "--help"])
    assert "'fit test' alone checks this installation" in " ".join(capsys.readouterr().out.split())


class Described:
    """Has a :class:`pathlib.Path`.

    Args:
        where: a folder, see :func:`~pathlib.Path.mkdir`
            for what it does.
    """

    def __init__(self, where: str | Path | None = None, sizes: list[int] | None = None) -> None: ...


def test_a_class_is_described_in_words() -> None:
    component = Component("model", "mine:Described", Described)
    lines = [" ".join(line.split()) for line in class_help("run", [component]).splitlines()]
    assert lines[2:6] == [
        "model: mine:Described",
        "Has a pathlib.Path.",
        "model.where str | Path | None default None; a folder, see pathlib.Path.mkdir for what it does.",
        "model.sizes list[int] | None default None",
    ]


def test_the_documentation_of_a_setting_stands_alone() -> None:
    texts = documentation()
    assert {
        name: text
        for name, text in texts.items()
        if text.startswith("The same") or not text.strip().endswith((".", ")"))
    } == {}
    assert not texts["min_epochs"].endswith("but then.")
