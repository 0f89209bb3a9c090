"""The map of modules to test files: what counts as executed, and what the tool prints for modules that the map does not know."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.tests_of import MAP, ROOT, answer, shares, text_of, with_new_modules

TOY = {
    "engine/__init__.py": "",
    "callbacks/__init__.py": "",
    "engine/sign.py": """\
def sign(number):
    \"\"\"The sign of a number.\"\"\"
    if number < 0:
        return -1
    return 1


ONE = sign(-1)
""",
    "tests/test_imports.py": "from engine.sign import ONE\n\ndef test_one():\n    assert ONE == -1\n",
    "tests/test_minus.py": "from engine.sign import sign\n\ndef test_minus():\n    assert sign(-2) == -1\n",
    "tests/test_rank.py": """\
import subprocess, sys

CODE = "from engine.sign import sign; import os; sign(2); os.kill(os.getpid(), 9)"

def test_a_killed_process():
    assert subprocess.run([sys.executable, "-c", CODE]).returncode == -9
""",
}
"""``sign`` has three parts: its first statement, which all callers execute, and one for either sign. Importing the module executes the one for -1."""


def test_what_each_test_file_executes_in_all_its_processes(tmp_path: Path) -> None:
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(
        ROOT / "tests" / "tools", tmp_path / "tests" / "tools", ignore=shutil.ignore_patterns("test_*", "*.json")
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "EXECUTED_"))}
    command = [sys.executable, "tests/tools/tests_of.py", "--write", "-n", "2"]
    ran = subprocess.run(
        command, cwd=tmp_path, env=variables | {"PYTHONPATH": ""}, capture_output=True, text=True, check=True
    )
    assert "3 passed" in ran.stdout, ran.stdout
    found = json.loads((tmp_path / "tests" / "tools" / "tests_of.json").read_text())
    assert found == {"engine/sign.py": {"tests/test_minus.py": 50.0, "tests/test_rank.py": 50.0}}


def test_a_part_counts_less_the_more_files_execute_it() -> None:
    executed = {"tests/a.py": {0, 1, 2}, "tests/b.py": {2}, "tests/c.py": {2}, "tests/d.py": {7}}
    numbers = {"engine/x.py": range(4), "engine/y.py": range(4, 6)}
    found = shares(executed, numbers)
    assert found == {"engine/x.py": {"tests/a.py": 77.8, "tests/b.py": 11.1, "tests/c.py": 11.1}, "engine/y.py": {}}
    assert json.loads(text_of(found)) == {"engine/x.py": found["engine/x.py"]}


def test_a_run_of_some_tests_adds_what_the_map_does_not_know(tmp_path: Path) -> None:
    for name in ("tests/test_a.py", "tests/test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = {"engine/known.py": {"tests/test_a.py": 60.0}, "engine/moved.py": {"tests/test_gone.py": 100.0}}
    names = ("engine/known.py", "engine/moved.py", "engine/new.py")
    measured = {name: {"tests/test_b.py": 100.0} for name in names} | {"engine/unused.py": {}}
    added = with_new_modules(found, measured, tmp_path)
    assert added == {"engine/known.py": found["engine/known.py"], **{name: measured[name] for name in names[1:]}}


def test_the_tool_answers_for_modules_that_are_known_new_and_gone(tmp_path: Path) -> None:
    for name in ("engine/loop/setup.py", "engine/loop/new.py", "tests/loop/test_run.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = {
        "engine/loop/setup.py": {"tests/loop/test_gone.py": 60.0, "tests/loop/test_run.py": 40.0},
        "engine/loop/gone.py": {"tests/loop/test_gone.py": 100.0},
    }
    for name in ("engine/loop/setup.py", str(tmp_path / "engine/loop/setup.py"), "engine.loop.setup"):
        text, is_known = answer(name, found, tmp_path)
        assert (text.split(), is_known) == (["tests/loop/test_run.py", "40.0", "%"], True)
    text, is_known = answer("engine/loop/new.py", found, tmp_path)
    assert not is_known
    assert text.startswith("engine/loop/new.py is executed by no test in the map")
    assert "python -m pytest tests/loop, or" in text
    text, is_known = answer("engine/loop/gone.py", found, tmp_path)
    assert (text.partition(";")[0], is_known) == ("engine/loop/gone.py is not a file of this checkout", False)
    assert "python -m pytest" not in answer("engine/other/new.py", found, tmp_path)[0]


@pytest.mark.parametrize("module", ["engine/fit.py", "engine/nowhere.py"])
def test_the_map_is_read(module: str) -> None:
    """A module of the map that has moved is not an error: the map is generated now and then, not with each commit."""
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/tools/tests_of.py", module], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (int(module == "engine/nowhere.py"), "")
    found = json.loads(MAP.read_text())
    assert all(answer(known, found)[0] for known in found)
