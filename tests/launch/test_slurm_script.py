"""The sbatch script of ``fit launch --slurm``: what it asks for, and what it does, run by a shell with an ``srun`` of the test's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import clean_environment

from engine.launch.job import LaunchError
from engine.launch.slurm import Batch, script, submit, time_limit

RANK = (sys.executable, "-c", "print('a rank')", "with space", "$HOME")


def launch(*arguments: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli.main", "launch", *map(str, arguments)]
    return subprocess.run(
        command, env=clean_environment(**environ), cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def asked(text: str) -> list[str]:
    return [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_what_it_asks_for() -> None:
    batch = Batch(
        RANK, nodes="2-4", ntasks_per_node=8, job_name="my job", gpus_per_node="8", cpus_per_task="6", mem="100G", time="1-12", partition="gpu",
        account="us", qos="high", output="logs/%x-%j.out", grace_s=90, requeue=False, further=("exclusive", "--comment=a b"),
    )  # fmt: skip
    assert asked(script(batch)) == [
        "--job-name=my job", "--nodes=2-4", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=6", "--mem=100G", "--time=1-12",
        "--partition=gpu", "--account=us", "--qos=high", "--output=logs/%x-%j.out", "--open-mode=append", "--signal=TERM@90", "--no-requeue",
        "--exclusive", "--comment=a b",
    ]  # fmt: skip
    assert asked(script(Batch(RANK))) == [
        "--job-name=fit", "--nodes=1", "--ntasks-per-node=1", "--output=runs/logs/%x-%j.out", "--open-mode=append", "--signal=TERM@120", "--requeue",
    ]  # fmt: skip


SRUN = """#!/bin/bash
# Runs the task that srun would run as rank 0, after the options; it ends as the file "plan" says, a line each time.
while [ "${1#--}" != "$1" ]; do shift; done
read -r how < plan; sed -i 1d plan
echo "srun: $how"
SLURM_PROCID=0 "$1" "$2" "$3" "$4" bash -c "$how"
"""


@pytest.mark.parametrize(
    ("plan", "restarts", "status", "requeued", "runs"),
    [
        (["exit 0"], 0, 0, False, 1),
        (["exit 7"], 0, 7, False, 1),
        (["exit 143"], 0, 143, True, 1),  # the ranks have saved
        (["kill -TERM $$"], 0, 143, True, 1),  # they had no handler yet
        (["kill -KILL $$", "exit 0"], 1, 0, False, 2),
        (["exit 1", "exit 2", "exit 3"], 2, 3, False, 3),
        (["exit 1", "exit 143"], 1, 143, True, 2),
        # The whole step gets the signal, the shell around the rank too.
        (["kill -TERM $PPID; exit 143"], 0, 143, True, 1),
        (["kill -TERM $PPID; exit 0"], 0, 0, False, 1),
    ],
)
def test_what_it_does(tmp_path: Path, plan: list[str], restarts: int, status: int, requeued: bool, runs: int) -> None:
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\necho "scontrol: $*"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "plan").write_text("".join(f"{line}\n" for line in plan))
    environ = clean_environment(SLURM_JOB_ID="12", TMPDIR=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    text = script(Batch(RANK, max_restarts=restarts))
    done = subprocess.run(
        ["bash"], input=text, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == status, done.stderr
    assert ("scontrol: requeue 12" in done.stdout) is requeued
    assert done.stdout.count("srun: ") == runs
    assert done.stderr.count("fit launch: a rank failed") == runs - 1
    assert not list(tmp_path.glob("fit-told*"))


def test_no_requeue_still_tells_the_exit_status() -> None:
    text = script(Batch(RANK, requeue=False))
    assert "scontrol" not in text
    assert "status=143" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("2:00:30", 7230), ("1-12", 129600), ("1-12:30", 131400), ("1-12:30:15", 131415), ("0", None),
        ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_time_limits_are_sbatchs(text: str, seconds: int | None) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"time": "soon"}, "--time 'soon': minutes, M:S"),
        ({"time": "3"}, "--time 3 is 180 s, and SIGTERM comes 120 to 180 s before its end"),
        ({"further": ("nodes=3",)}, "give it as --nnodes"),
        ({"further": ("--signal=USR1",)}, "give it as --signal"),
        ({"further": ("N=3",)}, "give the long name"),
        ({"further": ("comment=a\nb",)}, "give the long name"),
        ({"partition": "a\nb"}, "partition='a.nb' has a line break"),
    ],
)
def test_what_cannot_be_asked_for(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        Batch(RANK, **fields)


def test_the_command_prints_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "fit.yaml").touch()
    arguments = (
        "--slurm",
        "--dry-run",
        "--nnodes",
        2,
        "--gpus-per-node",
        "a100:4",
        "--config",
        "fit.yaml",
        "--grace",
        60,
        "--max-restarts",
        3,
    )
    done = launch(*arguments, "train.py", "--lr", "0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=a100:4",
        "--signal=TERM@60",
    } <= set(asked(done.stdout))
    assert f"export FIT_CONFIG={tmp_path / 'fit.yaml'}\n" in done.stdout
    assert f'"$told" {sys.executable} -u train.py --lr 0.1\n' in done.stdout
    assert '"$restarts" -ge 3' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slurm", "--ray", "train.py"], "--slurm and --ray: give one of them"),
        (["--slurm", "--rdzv", "a:1", "train.py"], "--rdzv has no effect with --slurm"),
        (["--dry-run", "train.py"], "--dry-run has no effect without --slurm"),
        (["--ray", "--partition", "a", "train.py"], "--partition has no effect with --ray"),
        (["--ray-address", "a", "train.py"], "--ray-address has no effect without --ray"),
        (["--slurm", "--nproc", "gpu", "train.py"], "the machines are not known yet"),
        (["--slurm", "--signal", "USR1@60", "train.py"], "the ranks save at SIGTERM: give TERM@SECONDS"),
        (["--slurm", "--dry-run", "tain.py"], "there is no script 'tain.py'; did you mean 'train.py'"),
        (["--ray", "--nproc", "cpu", "train.py"], "--nproc 'cpu' with --ray: a number, auto or gpu"),
    ],
)
def test_arguments_that_contradict_each_other(tmp_path: Path, arguments: list[str], reason: str) -> None:
    (tmp_path / "train.py").touch()
    done = launch(*arguments, cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert reason in done.stderr


def test_without_sbatch(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = launch("--slurm", "train.py", cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("fit launch: --slurm: there is no sbatch on this machine's PATH")


def test_a_job_submitted_from_within_a_step_does_not_inherit_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\nenv > seen\ncat > script\necho '12;cluster'\n")
    (tmp_path / "sbatch").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_STEP_ID": "0", "SLURM_CONF": "/etc/conf", "MINE": "1"}
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert submit("text", environ) == "12"
    finally:
        os.chdir(before)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "SLURM_CONF=/etc/conf" in seen
    assert "MINE=1" in seen
    assert not any(line.startswith("SLURM_STEP") for line in seen)
    assert (tmp_path / "script").read_text() == "text"
