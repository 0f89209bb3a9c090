"""``Fit.__init__`` and the chapter repeat the settings, and a setting that is added to them, as one field, works everywhere."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from tools.settings_text import updated

from engine import Fit, Settings

ROOT = Path(__file__).resolve().parents[2]
WRITE = "tests/tools/settings_text.py"
TEXT = 'Color of the run in overviews: ``"red"``, ``"green"``, or ``None``.'
FIELD = f'''\
    color: str | None = setting(Word("red", "green", none="no color"), None)
    """{TEXT}"""
'''
NET = """\
import torch
from engine import TrainModule

class Net(TrainModule):
    def __init__(self, width: int = 1): super().__init__()
"""
CODE = """\
import os, pydoc
from engine import Fit

def show(**given):
    fit = Fit(**given)
    print(fit.settings.color, "from", fit.origins["color"], end="; ")

show(color="RED")
show()
os.environ["FIT_CONFIG"] = "green.yaml"
show()
os.environ["FIT_COLOR"] = "null"
show()
show(color="red")
try:
    show(color="redd")
except ValueError as error:
    print(error)
print(pydoc.render_doc(Fit))
"""
COMMAND_LINE = """\
from engine import Fit
from jsonargparse import ArgumentParser

parser = ArgumentParser()
parser.add_class_arguments(Fit, "fit")
parser.print_help()
print(parser.instantiate_classes(parser.parse_args()).fit.settings.color)
"""


def test_the_arguments_of_fit_and_the_table_of_the_chapter_are_those_of_the_settings() -> None:
    assert [path for path, text in updated().items() if path.read_text() != text] == [], f"python {WRITE} --write"


def test_arguments_have_types_that_editors_can_follow() -> None:
    names = [field.name for field in fields(Settings)]
    hints = typing.get_type_hints(Fit.__init__)
    assert [name for name in names if name not in hints or hints[name] is typing.Any] == []
    assert list(inspect.signature(Fit.__init__).parameters) == ["self", *names]


Ended = Callable[..., str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Runs Python in a folder, with a copy of the library that has one setting more, and gives what it wrote."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("engine", "callbacks", "tests/tools", "tests/compat/migrate"):
        shutil.copytree(ROOT / folder, copy / folder)  # with the bytecode of what stays as it is
    for metadata in ROOT.glob("*.egg-info"):
        shutil.copytree(metadata, copy / metadata.name)
    settings = copy / "engine" / "config" / "settings.py"
    place = "    on_nonfinite: "
    assert settings.read_text().count(place) == 1
    settings.write_text(settings.read_text().replace(place, FIELD + place))
    work = copy / "work"
    work.mkdir()
    for name, text in {
        "net.py": NET,
        "in_code.py": CODE,
        "own.py": COMMAND_LINE,
        "read.py": "print(open('new.yaml').read())",
    }.items():
        (work / name).write_text(text)
    (work / "green.yaml").write_text("seed: 1\ncolor: green\n")

    def run(*arguments: str, status: int = 0, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FIT_")}
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=work,
            env={**environment, "PYTHONPATH": str(copy), "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == status, process.stdout + process.stderr
        return " ".join((process.stderr if status else process.stdout).split())

    run(str(copy / WRITE), status=1)
    run(str(copy / WRITE), "--write")
    return run


COMMAND = ("-m", "engine.cli.main")


def test_a_new_setting_is_an_argument_in_code_and_read_from_the_environment_and_the_file(ended: Ended) -> None:
    output = ended("in_code.py")
    assert output.startswith(
        "red from code; None from default; green from file green.yaml:2; None from environment FIT_COLOR; red from code; "
        "color='redd' is unknown; did you mean 'red'?; possible: 'red' or 'green', or None for no color "
    )
    assert f" color: {TEXT} " in output
    assert "color: 'str | None' = None, " in output


def test_a_new_setting_is_in_files_that_are_written_and_checked(ended: Ended) -> None:
    assert "green.yaml: 2 setting(s), all valid" in ended(*COMMAND, "config", "--check", "green.yaml")
    ended(*COMMAND, "config", "--default", "--output", "new.yaml")
    assert '# Color of the run in overviews: "red", "green", or null. # color: null' in ended("read.py")


def test_a_new_setting_is_set_on_the_command_line(ended: Ended) -> None:
    words = (*COMMAND, "run", "net.py", "--config", "green.yaml", "--print-config", "--set")
    assert "color: red # command line color=red" in ended(*words, "color=red")
    assert "fit: error: command line color=redd: color='redd' is unknown" in ended(*words, "color=redd", status=2)


def test_a_new_setting_is_completed(ended: Ended, tmp_path: Path) -> None:
    for line, completions in {"col": {"color="}, "color=": {"color=red", "color=green", "color=null"}}.items():
        words = f"fit run --set {line}"
        shell = {"COMP_LINE": words, "COMP_POINT": str(len(words)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
        answers = tmp_path / line
        ended(*COMMAND, **shell, COMP_WORDBREAKS=" ", _ARGCOMPLETE_STDOUT_FILENAME=str(answers))
        assert {word.strip() for word in answers.read_text().split("\n")} == completions


def test_a_new_setting_is_in_every_help(ended: Ended) -> None:
    assert ", seed, color, on_nonfinite, " in ended(*COMMAND, "run", "--help")
    own = ended("own.py", "--fit.color=green")  # a user's own command line
    assert f"--fit.color COLOR {TEXT} (type: str" in own
    assert own.endswith(" green")
