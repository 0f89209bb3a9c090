"""What the shells complete, typed into the shells themselves where they are installed."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from support.ranks import clean_environment

from engine import strategies
from engine.cli.completion import _fitting
from engine.cli.main import COMMANDS
from engine.config.settings import KINDS, Settings, checked_setting

ALL = "\x1b*"
"""The key of bash that inserts all candidates."""
LEFT = "\x1b[D"
RC = """\
PS1='ready> '
line() { printf '<%s>\\n' "$1"; }
"""


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.words])
def test_values_are_possible(name: str) -> None:
    for value in KINDS[name].words:
        checked_setting(name, {"true": True, "false": False, "null": None}.get(value, value))


def test_all_strategies_are_offered() -> None:
    with pytest.raises(ValueError) as known:
        strategies.get("?")
    for name in KINDS["strategy"].words:
        assert f" {name}," in str(known.value)
    assert len(KINDS["strategy"].words) == str(known.value).split("possible: ")[1].count(", ")


def test_only_these_shells(fit) -> None:
    assert fit("completion", "csh").status == 2
    lines = fit("completion", "--help").out.splitlines()
    for line in ('eval "$(fit completion bash)"', 'eval "$(fit completion zsh)"', "fit completion fish | source"):
        assert f"  {line}" in lines


@pytest.mark.parametrize("more", [{"COMP_LINE": "fit r", "COMP_POINT": "here"}, {"COMP_LINE": "fit r"}, {}])
def test_completions_that_no_shell_asks_for_are_an_error_in_a_line(more: dict[str, str]) -> None:
    environment = {**clean_environment(), "_ARGCOMPLETE": "1", **more}
    code = "import sys\nfrom engine.cli.main import main\nsys.exit(main())"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("fit: error: _ARGCOMPLETE is set")
    assert ran.stderr.count("\n") == 1


def test_names_that_a_terminal_would_obey_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash looks for files itself; the others print what they are given."""
    for name in ("plain", "a\x1b[2J", "b\u202e"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_ARGCOMPLETE_SHELL", "zsh")
    assert _fitting("", ()) == ["plain"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose shells read the documented lines, and a directory with files and a package that has a strategy.

    ``bin/fit`` is the command; ``traced/fit`` also writes what it imports, ``broken/fit`` fails.
    """
    home = tmp_path_factory.mktemp("home")
    for place, line in {
        "bin": f'exec {sys.executable} -m engine.cli.main "$@"',
        "traced": f'exec {sys.executable} -v -m engine.cli.main "$@" 2> {home}/imports',
        "broken": "echo broken; echo broken >&2; exit 1",
    }.items():
        (home / place).mkdir()
        (home / place / "fit").write_text(f"#!/bin/sh\n{line}\n")
        (home / place / "fit").chmod(0o755)
    (home / ".bashrc").write_text(RC + 'eval "$(fit completion bash)"\n')
    (home / ".zshrc").write_text(
        RC + 'bindkey -e; autoload -U compinit; compinit -D -u; eval "$(fit completion zsh)"\n'
    )
    (home / "fish").mkdir()
    (home / "fish" / "config.fish").write_text("fit completion fish | source\n")
    work = home / "work"
    (work / "folder").mkdir(parents=True)
    for name in ("net.py", "fit.yaml", "my file", "devices.txt"):
        (work / name).touch()
    (work / "other-1.dist-info").mkdir()
    (work / "other-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (work / "other-1.dist-info" / "entry_points.txt").write_text("[engine.strategies]\nother = other:Strategy\n")
    return home


def environment(home: Path) -> dict[str, str]:
    return clean_environment(
        PATH=f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", HOME=str(home), XDG_CONFIG_HOME=str(home), TERM="dumb"
    )


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, command: list[str], home: Path) -> None:
        self.home = home
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *command],
            env=environment(home),
            cwd=home / "work",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.screen = self._until("ready> ")

    def typed(self, keys: str) -> str:
        """The line after these keys and an ``X``, which shows where the cursor was."""
        assert self._process.stdin is not None
        self._process.stdin.write(f'{keys}X\x01line "\x05"\r'.encode())
        self._process.stdin.flush()
        self.screen = self._until(r"\n<[^\r\n]*>\r\n.*ready> ")
        return re.findall(r"\n<(.*)>\r", self.screen)[-1]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"exit\r")
        self._process.stdin.close()
        self._process.wait(300)
        self._process.stdout.close()

    def _until(self, pattern: str) -> str:
        assert self._process.stdout is not None
        number, seen = self._process.stdout.fileno(), b""
        while not re.search(pattern, seen.decode(errors="replace"), re.DOTALL):
            assert select.select([number], [], [], 300)[0], seen
            more = os.read(number, 65536)
            assert more, seen
            seen += more
        return seen.decode()


@pytest.fixture(scope="module")
def bash(home: Path) -> Iterator[Terminal]:
    yield from _terminal(["bash", "-i"], home)


@pytest.fixture(scope="module")
def zsh(home: Path) -> Iterator[Terminal]:
    yield from _terminal(["zsh", "-d", "-i"], home)


def _terminal(command: list[str], home: Path) -> Iterator[Terminal]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    terminal = Terminal(command, home)
    yield terminal
    terminal.close()


BOTH = [
    ("fit va\t", "fit validate X"),
    ("fit run --res\t", "fit run --resume X"),
    ("fit run net:Net --resume a\t", "fit run net:Net --resume auto X"),
    ("fit run --set strategy=fs\t", "fit run --set strategy=fsdp X"),
    ("fit run --set=strategy=fs\t", "fit run --set=strategy=fsdp X"),
    ("fit run --set strategy=o\t", "fit run --set strategy=other X"),
    ("fit run --set seed=1 dev\t", "fit run --set seed=1 devices=X"),
    ("fit run --set mod\t", "fit run --set model.X"),
    ("fit run --set seed=1 fold\t", "fit run --set seed=1 folder/X"),
    ("fit run --set model.file=n\t", "fit run --set model.file=net.py X"),
    ("fit run --config=fi\t", "fit run --config=fit.yaml X"),
    ("fit run --resume fold\t", "fit run --resume folder/X"),
    ("FIT_SEED=1 fit va\t", "FIT_SEED=1 fit validate X"),
    (f"fit run --set strategy=fs dev{LEFT * 4}\t", "fit run --set strategy=fsdp"),
    ("fit env; fit va\t", "fit env; fit validate X"),
    ("fit run my\t", "fit run my\\ file X"),
    ("fit checkpoint show fit --js\t", "fit checkpoint show fit --json X"),
]
"""Keys, and the line that they leave."""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        *BOTH,
        (f"fit {ALL}", f"fit {' '.join(sorted(COMMANDS))} X"),
        (f"fit run --resume {ALL}", "fit run --resume auto best last X"),
        (f"fit run --set acc{ALL}", "fit run --set accelerator= accumulate_grad_batches= X"),
        (f"fit run --set seed=1 --print{ALL}", "fit run --set seed=1 --print-config X"),
        ("fit run net.py --callback ModelC\t", "fit run net.py --callback ModelCheckpoint X"),
        ("fit checkpoint ex\t", "fit checkpoint export X"),
        ("fit checkpoint export a b --dtype bf\t", "fit checkpoint export a b --dtype bf16 X"),
        (f"fit completion {ALL}", "fit completion bash fish zsh X"),
        ("fit run net:Ne\t", "fit run net:NeX"),
        ("fit nothing --conf\t", "fit nothing --confX"),
        ("../broken/fit run n\t", "../broken/fit run net.py X"),
    ],
)
def test_bash(bash: Terminal, keys: str, line: str) -> None:
    assert bash.typed(keys).startswith(line)
    assert "broken\r" not in bash.screen


@pytest.mark.parametrize(("keys", "line"), BOTH)
def test_zsh(zsh: Terminal, keys: str, line: str) -> None:
    assert zsh.typed(keys).startswith(line)


def test_all_settings_are_offered(bash: Terminal) -> None:
    names = {f"{each.name}=" for each in fields(Settings) if each.name != "callbacks"}
    assert {*bash.typed(f"fit run --set {ALL}").split()} == names | {
        "model.",
        "data.",
        "callbacks.",
        "fit",
        "run",
        "--set",
        "X",
    }


def test_no_command_is_imported(bash: Terminal) -> None:
    assert bash.typed("../traced/fit env --js\t") == "../traced/fit env --json X"
    names = set(re.findall(r"^import '(.*)'", (bash.home / "imports").read_text(), re.MULTILINE))
    assert names >= {"argcomplete", "engine.cli.completion", "engine.cli.options"}
    assert not names & {"torch", "numpy", "yaml", "rich", "jsonargparse", "engine.cli.env", "engine.cli.run"}


def test_fish(home: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    cases = {
        "fit va": ["validate"],
        "fit run --set strategy=fs": ["strategy=fsdp"],
        "fit run --set=strategy=fs": ["--set=strategy=fsdp"],
        "fit run --set seed=1 dev": ["devices="],
        "fit run --set mod": ["model."],
        "fit run n": ["net.py"],
        "fit run --config f": ["fit.yaml", "folder/"],
        "FIT_SEED=1 fit va": ["validate"],
    }
    lines = "; ".join(f"complete -C '{line}' | cut -f 1; echo end" for line in cases)
    done = subprocess.run(
        ["fish", "-c", lines], env=environment(home), cwd=home / "work", capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert [offered.split() for offered in done.stdout.split("end\n")[:-1]] == list(cases.values())
