"""``fit launch --slurm``: writes and submits an sbatch script that runs the ranks as tasks of a job step.

The script does this::

    until the ranks succeed, get SIGTERM, or have no restarts left:
        srun the ranks: each is a task, and the first one that fails ends the others
    after SIGTERM (the time limit is near, or the job is preempted; the ranks save and exit with 143):
        requeue the job

srun returns the largest exit status of all tasks, and sends SIGTERM itself when a task fails. To tell that from a SIGTERM of SLURM's, a task
that exits with 143 counts as successful, and the first rank's task creates a file on its machine, where the script runs, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.launch.job import LaunchError, command_of, config_variables, nodes_of

EARLY_S = 60
"""Time (s) by which SLURM may send a signal earlier than requested."""
_SET_BY_SCRIPT = {
    "nodes": "--nnodes",
    "ntasks-per-node": "--nproc",
    "ntasks": "--nproc and --nnodes",
    "requeue": "no option, it is the default",
    "open-mode": "no option, it is append",
    **{
        name: f"--{name}"
        for name in ("job-name", "time", "signal", "output", "no-requeue", "cpus-per-task", "gpus-per-node")
    },
}
"""sbatch's options that the script sets itself -> the option of ``fit launch`` for each."""


@dataclass(frozen=True)
class Batch:
    """The options of an sbatch script. Fields have the names of sbatch's options; SLURM decides those that are empty."""

    command: tuple[str, ...]
    """Program and arguments of each rank."""
    nodes: str = "1"
    ntasks_per_node: int = 1
    job_name: str = "fit"
    gpus_per_node: str = ""
    cpus_per_task: str = ""
    mem: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    output: str = "runs/logs/%x-%j.out"
    grace_s: int = 120
    """Time (s) before the time limit at which the ranks get SIGTERM."""
    requeue: bool = True
    """Whether to requeue the job after SIGTERM, and after the loss of a node."""
    max_restarts: int = 0
    """Maximum number of restarts of the ranks within the job after a rank has failed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""
    further: tuple[str, ...] = ()
    """Other options of sbatch, as ``"key=value"`` or ``"key"``."""

    def __post_init__(self) -> None:
        for name in (
            "nodes",
            "job_name",
            "gpus_per_node",
            "cpus_per_task",
            "mem",
            "time",
            "partition",
            "account",
            "qos",
            "output",
        ):
            if "\n" in getattr(self, name):
                raise LaunchError(f"{name}={getattr(self, name)!r} has a line break")
        if (
            self.time
            and self.requeue
            and (seconds := time_limit(self.time)) is not None
            and seconds <= self.grace_s + EARLY_S
        ):
            raise LaunchError(
                f"--time {self.time} is {seconds} s, and SIGTERM comes {self.grace_s} to {self.grace_s + EARLY_S} s before its end: the job would be "
                "requeued as soon as it runs. Request more time, or give the ranks less with --grace S"
            )
        for option in self.further:
            name = option.lstrip("-").partition("=")[0]
            # One-letter options are refused, because one may stand for an option that the script sets.
            if not re.fullmatch(r"[A-Za-z][\w-]+(=[^\n]*)?", option.lstrip("-")):
                raise LaunchError(
                    f"--slurm-option {option!r}: give the long name of an sbatch option, as KEY=VALUE or KEY"
                )
            if name in _SET_BY_SCRIPT:
                raise LaunchError(f"--slurm-option {option}: give it as {_SET_BY_SCRIPT[name]}")


def time_limit(text: str) -> int | None:
    """The seconds of a time limit in sbatch's forms (``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M``, ``D-H:M:S``); ``None``: no limit.

    Raises:
        LaunchError: ``text`` has none of these forms.
    """
    if text.lower() in ("infinite", "unlimited", "0"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise LaunchError(f"--time {text!r}: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S is needed")
    days, *clock = (int(part) if part is not None else None for part in match.groups())
    parts = [part for part in clock if part is not None]
    if days is None:  # counted from the right, except for minutes alone
        hours, minutes, seconds = (0, parts[0], 0) if len(parts) == 1 else (0, *parts) if len(parts) == 2 else parts
    else:  # counted from the left
        hours, minutes, seconds = [*parts, 0, 0][:3]
    return (days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def script(batch: Batch) -> str:
    """The text of the sbatch script."""
    options = {
        "job-name": batch.job_name,
        "nodes": batch.nodes,
        "ntasks-per-node": str(batch.ntasks_per_node),
        "gpus-per-node": batch.gpus_per_node,
        "cpus-per-task": batch.cpus_per_task,
        "mem": batch.mem,
        "time": batch.time,
        "partition": batch.partition,
        "account": batch.account,
        "qos": batch.qos,
        "output": batch.output,
    }
    lines = [shlex.quote(f"--{name}={value}") for name, value in options.items() if value]
    lines += ["--open-mode=append", f"--signal=TERM@{batch.grace_s}", "--requeue" if batch.requeue else "--no-requeue"]
    lines += [shlex.quote(f"--{option.lstrip('-')}") for option in batch.further]
    # Since SLURM 22.05 srun does not inherit this option from sbatch.
    cores = f" --cpus-per-task={batch.cpus_per_task}" if batch.cpus_per_task else ""
    ranks = f'srun --kill-on-bad-exit=1 --label{cores} bash -c {shlex.quote(_TASK)} "$told" {shlex.join(batch.command)}'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in batch.variables.items()),
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
            "",
            'told="${TMPDIR:-/tmp}/fit-told-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
            "restarts=0",
            "while true; do",
            '    rm -f "$told"',
            f"    {ranks}",
            "    status=$?",
            f'    if [ "$status" -eq 0 ] || [ "$restarts" -ge {batch.max_restarts} ]; then break; fi',
            "    restarts=$((restarts + 1))",
            f'    echo "fit launch: a rank failed (exit status $status); restart $restarts of {batch.max_restarts}" >&2',
            "done",
            'if [ "$status" -eq 0 ] && [ -e "$told" ]; then',
            '    rm -f "$told"',
            "    status=143",
            *(_REQUEUE if batch.requeue else ()),
            "fi",
            'exit "$status"',
            "",
        ]
    )


_TASK = 'trap : TERM; "$@"; status=$?; if [ $status -eq 143 ]; then [ $SLURM_PROCID -ne 0 ] || : > "$0"; exit 0; fi; exit $status'
"""Shell commands of each task, which run its rank; they leave SIGTERM to the rank."""
_REQUEUE = (
    "    # After scancel this script ends, too, and does not get here.",
    '    echo "fit launch: the job is requeued, to continue from its last checkpoint" >&2',
    '    scontrol requeue "$SLURM_JOB_ID"',
)


def submit(text: str, environ: Mapping[str, str]) -> str:
    """Submit a script by sbatch.

    Args:
        text: the script, as :func:`script` returns it.
        environ: environment variables for sbatch and the job; those of a surrounding job step are left out.

    Returns:
        The job's number.

    Raises:
        LaunchError: there is no sbatch, or it refuses the job; the message has sbatch's.
    """
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise LaunchError(
            "--slurm: there is no sbatch on this machine's PATH; run it on a login node, or use --dry-run"
        )
    variables = {
        name: value for name, value in environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    sbatch = subprocess.run(
        ["sbatch", "--parsable"], input=text, env=variables, capture_output=True, text=True, check=False
    )
    if sbatch.returncode:
        raise LaunchError(
            f"sbatch refuses the job (exit status {sbatch.returncode}):\n{(sbatch.stderr or sbatch.stdout).rstrip()}"
        )
    return sbatch.stdout.strip().partition(";")[0]


def batch_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Batch:
    """The job that the options of ``fit launch`` describe.

    Raises:
        LaunchError: an option, or a combination of options, is invalid.
    """
    min_nodes, max_nodes = nodes_of("--nnodes", options.nnodes or "1")
    command = command_of(options)
    name = options.job_name or Path(options.script).stem
    return Batch(
        command,
        nodes=str(min_nodes) if min_nodes == max_nodes else f"{min_nodes}-{max_nodes}",
        ntasks_per_node=_tasks(options),
        job_name=name,
        grace_s=_grace(options),
        requeue=not options.no_requeue,
        max_restarts=_whole_number("--max-restarts", options.max_restarts or "0"),
        output=options.output or f"{options.log_dir or 'runs/logs'}/%x-%j.out",
        variables=config_variables(options.config, environ),
        further=tuple(options.slurm_option),
        **{
            field: getattr(options, field) or ""
            for field in ("gpus_per_node", "cpus_per_task", "mem", "time", "partition", "account", "qos")
        },
    )


def _whole_number(name: str, text: str) -> int:
    if not str(text).isdigit():
        raise LaunchError(f"{name} {text!r}: a whole number is needed")
    return int(text)


def _tasks(options: argparse.Namespace) -> int:
    """The number of ranks on each machine."""
    gpus = re.fullmatch(r"(?:[\w.-]+:)?(\d+)", options.gpus_per_node or "")
    if options.nproc in (None, "auto"):
        return int(gpus[1]) if gpus else 1
    if options.nproc == "gpu" and gpus:
        return int(gpus[1])
    if not options.nproc.isdigit() or options.nproc == "0":
        raise LaunchError(
            f"--nproc {options.nproc!r} with --slurm: the machines are not known yet; give a number, or --gpus-per-node N"
        )
    return int(options.nproc)


def _grace(options: argparse.Namespace) -> int:
    """The time (s) before the time limit at which the ranks get SIGTERM."""
    if options.signal is None:
        return round(options.grace)
    match = re.fullmatch(r"(?:SIG)?TERM(?:@(\d+))?|15(?:@(\d+))?", options.signal)
    if match is None:
        raise LaunchError(
            f"--signal {options.signal!r}: the ranks save at SIGTERM: give TERM@SECONDS (SECONDS before the time limit)"
        )
    return int(match[1] or match[2] or 60)  # sbatch's default


def main(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Submit, or with ``--dry-run`` print, the job that the options of ``fit launch`` describe.

    Returns:
        0; 1 if sbatch does not exist or refuses the job.

    Raises:
        LaunchError: for the reasons given at :func:`batch_of`.
    """
    batch = batch_of(options, environ)
    text = script(batch)
    if options.dry_run:
        print(text, end="")
        return 0
    folder = Path(batch.output).parent
    if "%" not in str(folder):
        folder.mkdir(parents=True, exist_ok=True)  # without this folder a job ends at once, without any message
    try:
        number = submit(text, environ)
    except LaunchError as error:
        print(f"fit launch: {error}", file=sys.stderr)
        return 1
    print(f"submitted job {number}; its output: {batch.output.replace('%x', batch.job_name).replace('%j', number)}")
    if batch.requeue:
        print(
            "at its time limit it saves and is requeued: the script continues with Fit.run(..., resume='auto')",
            file=sys.stderr,
        )
    return 0
