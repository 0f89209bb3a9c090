"""``fit launch``: the arguments. The work needs torch, and is imported when the arguments are valid."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from engine.launch.job import Job, LaunchError, make_job
from engine.utils.errors import nearest

AGENT = "engine.launch.agent"
"""The module whose ``run(job) -> exit status`` starts and supervises the ranks of this machine."""

SLURM, RAY = "engine.launch.slurm", "engine.launch.ray"
"""The modules whose ``main(options, environ) -> exit status`` submits the job to a cluster."""


def main(argv: Sequence[str]) -> int:
    """Start a script, a module or a program as the ranks of one job, and wait for its end.

    Returns:
        0 when all ranks succeeded; 1 when one failed, or the job could not be set up; 130 after Ctrl-C and 143 after SIGTERM (128 + the
        signal's number). Wrong arguments end the process with status 2 before anything is started.
    """
    arguments = parser().parse_args(list(argv))
    try:
        _check_cluster(arguments)
        if arguments.slurm or arguments.ray:
            return int(importlib.import_module(SLURM if arguments.slurm else RAY).main(arguments, os.environ))
        job = make_job(arguments, os.environ)
    except LaunchError as error:
        parser().error(str(error))
    return start(job)


def start(job: Job) -> int:
    """Run the ranks of this machine; the exit status, as :func:`main` returns it."""
    return int(importlib.import_module(AGENT).run(job))


class _Parser(argparse.ArgumentParser):
    """Errors name the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = (
            message.removeprefix("unrecognized arguments: ").split("=")[0].split(" ")[0]
            if message.startswith("unrecognized")
            else ""
        )
        super().error(f"{message}{nearest(unknown, self._option_string_actions) if unknown else ''}")


def parser() -> argparse.ArgumentParser:
    """The options of ``fit launch``; everything from the script on belongs to the script."""
    found = _Parser(
        prog="fit launch",
        usage="fit launch [options] script.py [arguments of the script]\n       fit launch [options] -m package.module [arguments]\n"
        "       fit launch [options] --no-python program [arguments]",
        description="Start a script as the processes (ranks) of one job, on this machine or on several, monitor and restart them.",
        epilog="torchrun's variables (PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_RDZV_ENDPOINT, "
        "PET_RDZV_ID, PET_MAX_RESTARTS) are the defaults of the options. Exit status: 0 success; 1 a rank failed; 2 wrong arguments; "
        "130 Ctrl-C; 143 SIGTERM.",
        allow_abbrev=False,
    )
    _add_processes(found)
    _add_failures(found)
    _add_output(found)
    _add_clusters(found)
    what = found.add_argument_group("what is run")
    kind = what.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    kind.add_argument("--no-python", action="store_true", help="the script is any program")
    what.add_argument("script")
    what.add_argument("args", nargs=argparse.REMAINDER)
    return found


def _add_processes(found: argparse.ArgumentParser) -> None:
    where = found.add_argument_group("processes")
    where.add_argument("--nproc", metavar="N", help="processes on this machine: a number, 'gpu' (one per GPU), 'cpu' (one per core), "
                       "'auto' (one per GPU, or one); default: auto")  # fmt: skip
    where.add_argument(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="machines; with MIN:MAX the job continues while MIN are left and grows again; default: 1",
    )
    where.add_argument(
        "--node-rank", metavar="R", help="fix this machine's number, 0 to N-1; machine 0 serves the rendezvous"
    )
    where.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="the rendezvous of the machines: a port of one of them; not needed for one machine",
    )
    where.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="the name at the rendezvous, the same on all machines; default: fit (one machine: random)",
    )


def _add_failures(found: argparse.ArgumentParser) -> None:
    life = found.add_argument_group("failures")
    life.add_argument("--max-restarts", metavar="K", help="restart all ranks up to K times when one fails; default: 0")
    life.add_argument(
        "--grace",
        metavar="S",
        type=float,
        default=120.0,
        help="seconds that ranks get to save after SIGTERM or Ctrl-C; default: 120",
    )
    life.add_argument(
        "--dead-after",
        metavar="S",
        type=int,
        default=10,
        help="seconds without an answer after which a machine is considered dead; default: 10",
    )
    life.add_argument(
        "--join-wait",
        metavar="S",
        type=int,
        default=5,
        help="seconds to wait for more machines once MIN have joined; default: 5",
    )
    life.add_argument(
        "--join-timeout",
        metavar="S",
        type=int,
        default=600,
        help="seconds to wait for the machines to join; default: 600",
    )


def _add_output(found: argparse.ArgumentParser) -> None:
    out = found.add_argument_group("settings and output")
    out.add_argument(
        "--config", metavar="FILE", type=Path, help="the YAML file of settings, for every rank (its FIT_CONFIG)"
    )
    out.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="the parent of a new directory with a file per rank; default: runs/logs",
    )
    out.add_argument(
        "--show",
        metavar="RANKS",
        default="all",
        help="whose output is shown here: 'all', 'none', or '0,3'; default: all",
    )


def _add_clusters(found: argparse.ArgumentParser) -> None:
    slurm = found.add_argument_group(
        "SLURM", "submit a job whose tasks are the ranks; --nproc is its tasks on each node, --nnodes its nodes"
    )
    slurm.add_argument("--slurm", action="store_true", help="write an sbatch script and submit it")
    slurm.add_argument("--dry-run", action="store_true", help="print the script instead")
    for name, help in (
        ("job-name", "default: the script's name"),
        ("gpus-per-node", "also the default of --nproc"),
        ("cpus-per-task", "cores of each rank, and its OMP_NUM_THREADS"),
        *((name, "") for name in ("mem", "time", "partition", "account", "qos")),
        ("output", "default: runs/logs/NAME-JOB.out"),
        ("signal", "TERM@SECONDS before the time limit the ranks save and end; default: TERM@GRACE"),
    ):
        slurm.add_argument(f"--{name}", metavar="X", help=f"as for sbatch{'; ' if help else ''}{help}")
    slurm.add_argument(
        "--no-requeue", action="store_true", help="do not requeue the job after SIGTERM or the loss of a node"
    )
    slurm.add_argument(
        "--slurm-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other option of sbatch; may be repeated",
    )
    ray = found.add_argument_group("Ray")
    ray.add_argument(
        "--ray",
        action="store_true",
        help="run the ranks as workers of Ray Train; --nproc is their number, on all machines together",
    )
    ray.add_argument(
        "--ray-address", metavar="ADDRESS", help="the cluster; default: RAY_ADDRESS, else a new one on this machine"
    )


_NOT_FOR = {
    "slurm": ("node_rank", "rdzv", "rdzv_id", "dead_after", "join_wait", "join_timeout", "show", "ray_address"),
    "ray": (
        "nnodes",
        "node_rank",
        "rdzv",
        "rdzv_id",
        "grace",
        "dead_after",
        "join_wait",
        "join_timeout",
        "show",
        "no_python",
    ),
}
_SLURM_ONLY = (
    "dry_run",
    "job_name",
    "gpus_per_node",
    "cpus_per_task",
    "mem",
    "time",
    "partition",
    "account",
    "qos",
    "output",
    "signal",
)


def _check_cluster(options: argparse.Namespace) -> None:
    """Raise ``LaunchError`` for options that have no effect with this launcher."""
    if options.slurm and options.ray:
        raise LaunchError("--slurm and --ray: give one of them")
    kind = "slurm" if options.slurm else "ray" if options.ray else ""
    idle = () if kind == "slurm" else (*_SLURM_ONLY, "no_requeue", "slurm_option")
    default = parser().get_default
    for name in (*_NOT_FOR.get(kind, ("ray_address",)), *idle):
        if getattr(options, name) != default(name):
            where = f"with --{kind}" if kind else "without --ray" if name == "ray_address" else "without --slurm"
            raise LaunchError(f"--{name.replace('_', '-')} has no effect {where}")
