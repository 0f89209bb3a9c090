"""A real SLURM cluster of two nodes on this machine: srun, ``fit launch --slurm``, the time limit, requeueing, and what is not a task."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expected import DIGITS, TRAINED, accuracy, fit, reference, run
from slurm import Cluster, missing
from support.ranks import clean_environment

pytestmark = pytest.mark.slow

PLACE = (
    "import json, os; from engine.distributed.environments import detect; e = detect(os.environ);"
    "print(json.dumps([e.name, e.rank, e.world_size, e.local_rank, e.local_world_size, e.num_nodes]))"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no SLURM here: {reason}")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.__enter__()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"SLURM's daemons do not run here: {error}")
    with made.running():
        yield made


@pytest.fixture(scope="module")
def environ(cluster: Cluster) -> dict[str, str]:
    return clean_environment(SLURM_CONF=cluster.environment["SLURM_CONF"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reference(tmp_path_factory.mktemp("expected"))


def places(text: str) -> list[Any]:
    return sorted(json.loads(line) for line in text.splitlines() if line.startswith("["))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_weights_are_those_of_torchruns_ranks(
    environ: dict[str, str], expected: dict[str, Any], nodes: int, tmp_path: Path
) -> None:
    run("srun", "-N", nodes, "-n", 2, sys.executable, TRAINED, tmp_path, tmp_path / "result.json", environ=environ)
    assert json.loads((tmp_path / "result.json").read_text()) == expected


def test_digits(environ: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = run("srun", "-n", 2, sys.executable, DIGITS, "--max-epochs", 4, environ=environ, cwd=tmp_path)
    assert accuracy(text) > 90


def test_unequal_and_heterogeneous_tasks(environ: dict[str, str]) -> None:
    text = run("srun", "-N", 2, "-n", 3, sys.executable, "-c", PLACE, environ=environ)
    assert places(text) == [["slurm", 0, 3, 0, 2, 2], ["slurm", 1, 3, 1, 2, 2], ["slurm", 2, 3, 0, 1, 2]]
    text = run("salloc", "-n1", ":", "-n1", "srun", "--het-group=0,1", sys.executable, "-c", PLACE, environ=environ)
    assert places(text) == [["slurm", 0, 2, 0, 1, 2], ["slurm", 1, 2, 0, 1, 2]]


def test_shells_and_batch_scripts_are_no_tasks(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    alone = ["single", 0, 1, 0, 1, 1]
    assert places(run("salloc", "-n", 2, sys.executable, "-c", PLACE, environ=environ)) == [alone]
    assert places(run("srun", "-n", 1, sys.executable, "-c", PLACE, environ=environ)) == [alone]
    script = tmp_path / "script.sh"
    script.write_text(f'#!/bin/bash\n{sys.executable} -c "{PLACE}"\n')
    run("sbatch", "--wait", "-n", 2, "-o", tmp_path / "batch", script, environ=environ)
    assert places((tmp_path / "batch").read_text()) == [alone]
    # It inherits the step's numbers.
    submit = f"if [ $SLURM_PROCID = 0 ]; then sbatch --wait -n 2 -o {tmp_path / 'within'} {script}; fi"
    run("srun", "-n", 2, "--overlap", "sh", "-c", submit, environ=environ)
    assert places((tmp_path / "within").read_text()) == [alone]
    # A shell of two tasks on a terminal, and a step that is started from it.
    inside = f"import os; os.system({f'{sys.executable} -c {PLACE!r}'!r}); os.system({f'srun --overlap -n 2 {sys.executable} -c {PLACE!r}'!r})"
    spawn = [
        "script",
        "-qec",
        f'srun --overlap -n 2 --pty sh -c "{sys.executable} {tmp_path / "inside.py"}"',
        "/dev/null",
    ]
    (tmp_path / "inside.py").write_text(inside + "\n")
    written = run(*spawn, environ=environ)
    for mark in ("\r", "\0", "^@"):  # a terminal may echo what ends its input
        written = written.replace(mark, "")
    found = places(written)
    assert alone in found
    assert [place for place in found if place[0] == "slurm"][:2] == [["slurm", 0, 2, 0, 2, 1], ["slurm", 1, 2, 1, 2, 1]]


def submitted(
    cluster: Cluster,
    environ: dict[str, str],
    folder: Path,
    *arguments: object,
    timeout: float = 150,
    ranks: int | None = 2,
) -> tuple[str, str]:
    """State and output of a job that ``fit launch --slurm`` has submitted, at its end."""
    count = () if ranks is None else ("--nproc", ranks)
    text = fit("launch", "--slurm", *count, *arguments, environ=environ, cwd=folder)
    found = re.fullmatch(r"submitted job (\d+); its output: (\S+)\n", text)
    assert found, text
    return ended(cluster, found[1], folder / found[2], timeout)


def ended(cluster: Cluster, number: str, output: Path, timeout: float = 150) -> tuple[str, str]:
    """State and output of a job at its end."""
    deadline = time.monotonic() + timeout
    while True:
        state = cluster.run("scontrol", "show", "job", number, "-o").stdout
        name = re.search(r"JobState=(\w+)", state)
        assert name, state
        if name[1] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING"):
            return name[1], output.read_text()
        assert time.monotonic() < deadline, state + (output.read_text() if output.exists() else "")
        time.sleep(0.5)


def started(environ: dict[str, str], folder: Path) -> str:
    """The number of a job of 120 slow steps, some of which are done."""
    arguments = (TRAINED, folder / "root", folder / "result.json", "--slow", 0.5, "--steps", 120)
    text = fit("launch", "--slurm", "--nproc", 2, *arguments, environ=environ, cwd=folder)
    while not (folder / "root" / "trains").exists():
        time.sleep(0.3)
    return text.split()[2].rstrip(";")


def test_digits_submitted(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    state, text = submitted(
        cluster, environ, tmp_path, "--job-name", "a job", "--output", "out/%j.txt", DIGITS, "--max-epochs", 4
    )
    assert state == "COMPLETED", text
    assert accuracy(text) > 90


def test_a_rank_that_is_killed_restarts_the_ranks(
    cluster: Cluster, environ: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    arguments = ("--max-restarts", 1, TRAINED, tmp_path / "root", tmp_path / "result.json", "--die")
    state, text = submitted(cluster, environ, tmp_path, *arguments)
    assert state == "COMPLETED", text
    assert (tmp_path / "root" / "died").exists()
    assert "restart 1 of 1" in text
    assert json.loads((tmp_path / "result.json").read_text()) == expected


def test_a_rank_that_fails_fails_the_job(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    began = time.monotonic()
    state, text = submitted(
        cluster, environ, tmp_path, TRAINED, tmp_path / "root", tmp_path / "result.json", "--die", "--steps", 10000
    )
    assert state == "FAILED", text
    assert time.monotonic() - began < 500  # left alone, the other rank would end at its timeout of ten minutes


def test_the_time_limit_saves_and_requeues(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM comes 20 to 80 s before the end of two minutes; 0.5 s a step, at most 200 steps before it."""
    arguments = (TRAINED, tmp_path / "root", tmp_path / "result.json", "--slow", 0.5, "--steps", 220)
    state, text = submitted(cluster, environ, tmp_path, "--time", 2, "--grace", 20, *arguments, timeout=240)
    assert state == "COMPLETED", text
    assert text.count("SIGTERM: the run ends after this step, with exit code 143") == 2
    assert text.count("the job is requeued") == 1
    saved = sorted(int(path.name[5:]) for path in (tmp_path / "root" / "checkpoints").iterdir())
    assert 40 < saved[0] < 200
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["step"], result["status"], result["ranks"]) == (220, "completed", 2)
    # Undisturbed: the same bits.
    run(
        "srun",
        "-n",
        2,
        sys.executable,
        TRAINED,
        tmp_path / "other",
        tmp_path / "other.json",
        "--steps",
        220,
        environ=environ,
    )
    assert json.loads((tmp_path / "other.json").read_text()) == result


def test_sigterm_saves_and_requeues(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    """What a preempted job gets: its tasks, not its shell."""
    number = started(environ, tmp_path)
    run("scancel", "--signal=TERM", number, environ=environ)
    state, text = ended(cluster, number, tmp_path / "runs" / "logs" / f"trained-{number}.out")
    assert state == "COMPLETED", text
    assert text.count("the job is requeued") == 1
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 120


def test_gpus_of_the_node(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint('GPUS', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    state, text = submitted(cluster, environ, tmp_path, "--gpus-per-node", 2, tmp_path / "script.py", ranks=None)
    assert state == "COMPLETED", text
    assert sorted(line for line in text.splitlines() if "GPUS" in line) == ["0: GPUS 0,1", "1: GPUS 0,1"]
    seen = run("srun", "-n", 2, "--gpus-per-task=1", "printenv", "CUDA_VISIBLE_DEVICES", environ=environ)
    assert sorted(seen.split()) == ["0", "1"]  # with devices hidden by control groups it would be 0 twice


def test_a_shell_of_an_allocation_starts_ranks_itself(environ: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = run(
        "salloc", "-n", 2, sys.executable, DIGITS, "--devices", 2, "--max-epochs", 2, environ=environ, cwd=tmp_path
    )
    assert accuracy(text) > 70


def test_scancel_ends_the_job_for_good(cluster: Cluster, environ: dict[str, str], tmp_path: Path) -> None:
    number = started(environ, tmp_path)
    run("scancel", number, environ=environ)
    for _ in range(60):
        state = cluster.run("scontrol", "show", "job", number, "-o").stdout
        if "JobState=CANCELLED" in state and not cluster.run("squeue", "-h").stdout:
            break
        time.sleep(0.5)
    assert "JobState=CANCELLED" in state
    assert list((tmp_path / "root" / "checkpoints").iterdir())  # saved within KillWait


def test_what_sbatch_refuses_is_told(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit status 1[\s\S]*sbatch refuses the job[\s\S]*invalid partition"):
        fit("launch", "--slurm", "--partition", "none", DIGITS, environ=environ, cwd=tmp_path)
