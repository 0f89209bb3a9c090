"""What the shells are offered, in the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import clean_environment

from engine import strategies
from engine.cli import completion
from engine.cli.completion import VALUES, candidates
from engine.cli.main import COMMANDS
from engine.config.settings import Settings, check


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["va"], ["validate"]),
        (["run", "--res"], ["--resume"]),
        (["run", "--resume", ""], ["last", "auto", "best"]),
        (["run", "net:Net", "--resume", "a"], ["auto"]),
        (["run", "net:Net", "--set", "acc"], ["accelerator=", "accumulate_grad_batches="]),
        (["run", "--set", "seed=1", "strategy=fs"], ["strategy=fsdp"]),
        (["run", "--set", "precision=16"], ["precision=16-mixed", "precision=16-true", "precision=16"]),
        (["run", "--set", "seed=1", "--print"], ["--print-config"]),
        (["checkpoint", "ex"], ["export"]),
        (["checkpoint", "export", "a", "b", "--dtype", "bf"], ["bf16"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["run", "net.py", "--callback", "Mod"], ["ModelCheckpoint"]),
        (["run", ""], []),
        (["run", "--config", ""], []),
        (["nothing", ""], []),
    ],
)
def test_candidates(words: list[str], offered: list[str]) -> None:
    assert candidates(words) == offered


def test_all_commands_are_offered_first() -> None:
    assert candidates([""]) == [*COMMANDS, "--help", "--version"]
    assert candidates([]) == candidates([""])


@pytest.mark.parametrize("name", VALUES)
def test_values_are_possible(name: str) -> None:
    for value in VALUES[name]:
        check(name, {"true": True, "false": False, "null": None}.get(value, value))


def test_all_strategies_are_offered() -> None:
    with pytest.raises(ValueError) as known:
        strategies.get("?")
    for name in VALUES["strategy"]:
        assert f" {name}," in str(known.value)
    assert len(VALUES["strategy"]) == str(known.value).split("possible: ")[1].count(", ")
    assert "callbacks=" not in candidates(["run", "--set", ""])
    assert len(candidates(["run", "--set", ""])) == len(Settings.__dataclass_fields__) - 1 + 3


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that has ``fit``, its completion scripts, and a directory with two files."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fit").write_text(f'#!/bin/sh\nexec {sys.executable} -m engine.cli.main "$@"\n')
    (tmp_path / "bin" / "fit").chmod(0o755)
    for name, script in completion.SCRIPTS.items():
        (tmp_path / f"fit.{name}").write_text(script)
    (tmp_path / "work").mkdir()
    for name in ("net.py", "fit.yaml"):
        (tmp_path / "work" / name).touch()
    return clean_environment(
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path)
    )


def _run(command: list[str], shell: dict[str, str]) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        command, env=shell, cwd=Path(shell["HOME"]) / "work", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_the_command_prints_the_script(fit) -> None:
    assert fit("completion", "bash").out == completion.SCRIPTS["bash"]
    assert fit("completion", "csh").status == 2


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fit va", ["validate"]),
        ("fit run --set strategy=fs", ["fsdp"]),  # what follows the = is a word of its own to bash
        ("fit run --set seed=1 dev", ["devices="]),
        ("fit run net:Net --resume ", ["last", "auto", "best"]),
        ("fit run net", []),
    ],
)
def test_bash(shell: dict[str, str], line: str, offered: list[str]) -> None:
    script = f"""source ~/fit.bash
        COMP_LINE='{line}' COMP_POINT={len(line)}
        compopt() {{ :; }}  # works inside a completion only
        complete -p fit | grep -q -- '-o default.*-F _fit_complete' || exit 1
        _fit_complete fit; echo "${{COMPREPLY[@]}}" """
    assert _run(["bash", "-c", script], shell) == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fit va", ["validate"]),
        ("fit run --set strategy=fs", ["strategy=fsdp"]),
        ("fit run --set dev", ["open", "devices="]),
        ("fit run --config ''", ["files"]),
    ],
)
def test_zsh(shell: dict[str, str], words: str, offered: list[str]) -> None:
    # The functions that zsh has inside a completion only say what they are asked for.
    script = f"""compdef() {{ [[ "$*" == "_fit fit" ]] || echo "compdef $*" }}
        compadd() {{ [[ "$1" == -S ]] && {{ echo open; shift 2 }}; shift; print -l -- "${{(@P)1}}" }}
        compset() {{ : }}; _files() {{ echo files }}
        source ~/fit.zsh
        words=({words}); CURRENT=$#words; _fit"""
    assert _run(["zsh", "-fc", script], shell) == offered


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fit va", ["validate"]),
        ("fit run --set strategy=fs", ["strategy=fsdp"]),
        ("fit run n", ["net.py"]),
        ("fit run --config f", ["fit.yaml"]),
    ],
)
def test_fish(shell: dict[str, str], line: str, offered: list[str]) -> None:
    assert _run(["fish", "-c", f"source ~/fit.fish; complete -C '{line}'"], shell) == offered
