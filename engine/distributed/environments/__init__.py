"""Detects this process's rank and job from a launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from engine.distributed.environments.environment import Detector, Environment, shown
from engine.distributed.environments.kubernetes import Kubernetes
from engine.distributed.environments.mpi import MPICH, MVAPICH, OPEN_MPI
from engine.distributed.environments.slurm import Slurm, why_no_task
from engine.distributed.environments.torchrun import TELLING, Manual, Torchrun

__all__ = ["DETECTORS", "Environment", "detect", "hints"]

STARTERS: tuple[Detector, ...] = (OPEN_MPI, MVAPICH, MPICH, Slurm())
"""They start processes that may start others: ``mpirun`` uses ``srun`` inside an allocation, so the nearest one to the process comes first."""

DETECTORS: tuple[Detector, ...] = (Torchrun(), *STARTERS, Kubernetes(), Manual())
"""Tried in this order; the first that recognizes the environment describes it."""


def detect(environ: Mapping[str, str]) -> Environment:
    """This process's rank and job, from ``environ`` (usually ``os.environ``, which is only read).

    torchrun's complete set wins over MPI's and SLURM's variables, because someone ran it inside; then Open MPI, MVAPICH, MPICH and Intel MPI, SLURM,
    Kubernetes, and ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set by hand. Without any of these it is
    ``Environment("single")``: world size 1. An empty variable counts as unset.

    Raises:
        RuntimeError: the variables of a launcher are incomplete or contradict each other; the message shows those read.
    """
    for detector in DETECTORS:
        found = detector.detect(environ)
        if found is not None:
            _check_one_launcher(found, environ)
            return found
    return Environment("single")


def _check_one_launcher(found: Environment, environ: Mapping[str, str]) -> None:
    """Check for two launchers that contradict each other about one process."""
    if found.name in ("single", "kubernetes", "manual"):
        return
    set_besides = {name: environ[name] for name in TELLING if environ.get(name)}
    if found.name not in Torchrun.launchers:
        values = dict(
            zip(TELLING, (found.rank, found.world_size, found.local_rank, found.local_world_size), strict=True)
        )
        for name, text in set_besides.items():
            if text != str(values[name]):
                raise _contradiction(found, set_besides, f"{name} is {text!r}")
        return
    if Torchrun.elastic(environ):
        return
    for starter in STARTERS:
        other = _detected_or_none(starter, environ)
        if other is None:
            continue
        # More ranks than mpirun's or srun's processes: each of these has started some itself.
        if found.world_size < other.world_size or (found.world_size == other.world_size and found.rank != other.rank):
            raise _contradiction(other, set_besides, f"RANK is {found.rank} and WORLD_SIZE is {found.world_size}")
        return


def _detected_or_none(starter: Detector, environ: Mapping[str, str]) -> Environment | None:
    """Its environment, if its variables are consistent; they need not be if another launcher's are complete."""
    try:
        return starter.detect(environ)
    except RuntimeError:
        return None


def _contradiction(found: Environment, others: Mapping[str, str], reason: str) -> RuntimeError:
    return RuntimeError(
        f"the environment describes two jobs: {found.name} has started this process as rank {found.rank} of {found.world_size} (local rank "
        f"{found.local_rank} of {found.local_world_size}), but {reason}. Read: {shown(found.variables)}; {shown(others)}. "
        f"Unset {', '.join(name for name in others if name in TELLING)}: {found.name}'s own variables suffice."
    )


def hints(environ: Mapping[str, str], found: Environment) -> list[str]:
    """Notes for ``fit env`` about how ``found`` was detected."""
    lines = []
    why = why_no_task(environ)
    if found.name == "single" and why:
        lines.append(
            f"inside SLURM job {environ['SLURM_JOB_ID']}, but a single process, because {why}; several ranks are started by: "
            "srun --ntasks N python script.py, or: fit launch --slurm script.py"
        )
    if found.name == "single" and any(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        lines.append("MASTER_ADDR or MASTER_PORT is set, but no rank: they are not used")
    if found.name == "single" and environ.get("PET_NODE_RANK"):
        lines.append("the only pod of its job: a single process, which may start others by itself")
    over = STARTERS if found.name in Torchrun.launchers else ()
    others = [starter for starter in over if _detected_or_none(starter, environ)]
    lines += [f"{found.name}'s variables win over {_shown_names(starter, environ)}" for starter in others]
    return lines


def _shown_names(starter: Detector, environ: Mapping[str, str]) -> str:
    return ", ".join(name for name in starter.names if environ.get(name) and not name.startswith("MASTER_"))
