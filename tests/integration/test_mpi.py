"""Real ``mpirun``: it starts the processes, torch connects them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expected import DIGITS, TRAINED, accuracy, reference, run
from support.ranks import PATIENCE_S, clean_environment

pytestmark = pytest.mark.slow

MPIRUN = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "mpich": ["mpirun.mpich"],
}


@pytest.fixture(params=MPIRUN)
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    command = MPIRUN[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    return command


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reference(tmp_path_factory.mktemp("mpi"))


def test_the_weights_are_those_of_torchruns_ranks(mpirun: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    run(*mpirun, "-n", 2, sys.executable, TRAINED, tmp_path, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == expected
    assert expected["ranks"] == 2


def test_wrappers_between_mpirun_and_the_script(mpirun: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    """The processes agree on a port, though they have different parents."""
    run(*mpirun, "-n", 2, "sh", "-c", f"{sys.executable} {TRAINED} {tmp_path} {tmp_path / 'result.json'}; exit $?")
    assert json.loads((tmp_path / "result.json").read_text()) == expected


def test_two_jobs_at_once(mpirun: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [*mpirun, "-n", "2", sys.executable, TRAINED, tmp_path / str(i), tmp_path / f"{i}.json"],
            env=clean_environment(),
        )
        for i in range(2)
    ]
    assert [job.wait(PATIENCE_S) for job in jobs] == [0, 0]
    assert all(json.loads((tmp_path / f"{i}.json").read_text()) == expected for i in range(2))


def test_digits(mpirun: list[str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = run(*mpirun, "-n", 2, sys.executable, DIGITS, "--max-epochs", 4, cwd=tmp_path)
    assert accuracy(text) > 90


def test_a_rank_that_fails_ends_the_others_with_its_traceback(mpirun: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = (
        "from engine import Engine",
        "engine = Engine(accelerator='cpu')",
        "assert engine.process_index == 0, 'on purpose'",
    )
    script.write_text("\n".join([*lines, "engine.wait_for_everyone()", ""]))
    command = [*mpirun, "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode
    assert "AssertionError: on purpose" in done.stdout + done.stderr
