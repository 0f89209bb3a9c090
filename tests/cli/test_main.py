"""The console command, in separate processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import Ran, run_script

ROOT = Path(__file__).parents[2]
CONSOLE_SCRIPT = "import sys; from engine.cli.main import main; sys.exit(main())"


def fit(*arguments: str, **environ: str) -> Ran:
    return run_script(CONSOLE_SCRIPT, *arguments, check=False, env=environ)


def fit_env(*arguments: str, **environ: str) -> Ran:
    """Run ``fit env`` where torch is imported already."""
    return run_script(CONSOLE_SCRIPT, "env", *arguments, check=False, env=environ, forked=True)


@pytest.mark.parametrize(
    "arguments",
    [
        "['--help']",
        "['--version']",
        "['run', '--help']",
        "['checkpoint', '--help']",
        "['checkpoint', 'export', '--help']",
    ],
)
def test_the_start_imports_no_torch(arguments: str) -> None:
    code = (
        "import sys, engine.cli.main as cli\n"
        f"try: cli.main({arguments})\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'yaml', 'rich', 'argcomplete') if name in sys.modules])"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    done = fit("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("fit-trainer ")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(arguments: tuple[str, ...]) -> None:
    done = fit(*arguments)
    assert done.returncode == 0
    assert "usage: fit" in done.stdout
    assert re.search(r"\n  env +print versions", done.stdout)
    assert re.search(r"\n  checkpoint +list, show", done.stdout)


def test_an_unknown_command_is_an_error() -> None:
    done = fit("evn")
    assert done.returncode == 2
    assert "did you mean 'env'" in done.stderr


def test_env_has_each_setting_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fit.yaml").write_text("max_time: 10 min\n")
    done = fit_env("--json", FIT_PRECISION="bf16")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["settings"]["precision"] == {"value": "bf16-mixed", "origin": "environment FIT_PRECISION"}
    assert report["settings"]["max_time"] == {"value": "600 seconds", "origin": "file fit.yaml:1"}
    assert report["settings"]["callbacks"] == {"value": [], "origin": "default"}
    assert report["environment"]["world_size"] == 1
    assert report["versions"]["torch"].startswith("2.")
    assert report["devices"]["cpu"]
    assert report["devices"]["float32 products"] == "highest"
    kind = "cpu" if (found := torch.accelerator.current_accelerator(check_available=True)) is None else found.type
    assert "bf16" in report["devices"][f"{kind} has"].split(", ")
    assert ("streams" in report["devices"][f"{kind} lacks"]) is (kind == "cpu")
    assert report["devices"]["collectives"].endswith(f" for {kind}")
    assert report["errors"] == []


def test_env_for_people() -> None:
    done = fit_env()
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["log_every_n_steps", "50", "default"] in lines
    assert [line for line in lines if line[:2] == ["world_size", "1"]]


def test_env_shows_who_launched_the_process_and_how_that_is_known() -> None:
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    report = json.loads(fit_env("--json", **mpi, MASTER_PORT="4000").stdout)
    assert (report["environment"]["name"], report["environment"]["rank"], report["environment"]["master_port"]) == (
        "openmpi",
        1,
        4000,
    )
    assert report["variables"] == mpi | {"MASTER_PORT": "4000"}
    done = fit_env(SLURM_JOB_ID="7", SLURM_NTASKS="2")
    assert "hint: inside SLURM job 7, but a single process, because it was not started by srun" in done.stdout


def test_env_says_what_would_fail() -> None:
    done = fit_env(FIT_PRECISON="bf16", RANK="0")
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "WORLD_SIZE" in errors[0]
    assert "did you mean 'precision'" in errors[1]


def test_names_that_the_terminal_cannot_express_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "naïve 漢.py").write_text("class:\n")
    ended = fit("migrate", str(tmp_path), PYTHONIOENCODING="ascii")
    assert "Traceback" not in ended.stderr
    assert r"na\xefve \u6f22.py" in ended.stdout
