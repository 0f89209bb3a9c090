"""The options of all commands: they name the module that does the work, and are refused before it is imported."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import clean_environment

from engine.cli.main import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_module_that_runs_a_command_is_there(command: str) -> None:
    parser = COMMANDS[command].parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for each in [each for action in actions for each in action.choices.values()] or [parser]:
        assert callable(importlib.import_module(each.get_default("run_by")).run)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("run net:Net", "run"),
        ("test", "self_check"),
        ("test --json", "self_check"),
        ("test net:Net", "run"),
        ("test --print-config", "run"),
        ("test --set model.x=1", "run"),
        ("test --checkpoint last", "run"),
        ("checkpoint list folder", "checkpoint"),
        ("checkpoint export a b", "checkpoint_weights"),
        ("launch train.py", "launch"),
        ("launch --slurm train.py", "launch_on_cluster"),
        ("launch --ray train.py", "launch_on_cluster"),
    ],
)
def test_what_runs_depends_on_the_options(
    words: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command, *rest = words.split()
    parser = COMMANDS[command].parser()
    options = parser.parse_args(rest)
    parser.check(options)
    assert options.run_by == f"engine.cli.{module}"


WRONG = """
import sys
from engine.cli.main import main
for words in (
    "run --set max_epochs",
    "plan --seconds 0 --search",
    "plan --page plan.txt",
    "plan --measure net:Net",
    "launch --nproc 2 missing.py",
    "launch --slurm --ray train.py",
    "launch --slurm missing.py",
    "checkpoint export",
):
    try:
        status = main(words.split())
    except SystemExit as end:
        status = end.code
    print(status, "torch" in sys.modules, words)
"""


def test_wrong_options_end_a_command_before_torch_is_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRONG],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(lines := done.stdout.splitlines()) == WRONG.count('    "')
    assert [line for line in lines if not line.startswith("2 False ")] == []
