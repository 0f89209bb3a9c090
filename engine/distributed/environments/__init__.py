"""Detect this process's rank and job from a launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from engine.distributed.environments.environment import Detector, Environment, as_text
from engine.distributed.environments.kubernetes import Kubernetes
from engine.distributed.environments.mpi import MPICH, MVAPICH, OPEN_MPI
from engine.distributed.environments.slurm import Slurm, why_no_task
from engine.distributed.environments.torchrun import TELLING, Manual, Torchrun

__all__ = ["DETECTORS", "Environment", "detect", "hints"]

STARTERS: tuple[Detector, ...] = (OPEN_MPI, MVAPICH, MPICH, Slurm())
"""Launchers whose processes may start further ranks. MPI comes before SLURM, since ``mpirun`` uses ``srun`` inside an allocation."""

DETECTORS: tuple[Detector, ...] = (Torchrun(), *STARTERS, Kubernetes(), Manual())
"""The detectors in the order in which :func:`detect` tries them; the first one that recognizes the environment is used."""


def detect(environ: Mapping[str, str]) -> Environment:
    """Read this process's rank and job from ``environ`` (usually ``os.environ``, which is only read).

    torchrun's complete set of variables takes precedence over those of MPI and SLURM, because then torchrun was started inside them. Next come
    Open MPI, MVAPICH, MPICH and Intel MPI, SLURM, Kubernetes, and ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set by hand. Without
    any of these the result is ``Environment("single")``, world size 1. An empty variable counts as unset.

    Raises:
        RuntimeError: the variables of a launcher are incomplete or contradict each other; the message shows the variables.
    """
    for detector in DETECTORS:
        environment = detector.detect(environ)
        if environment is not None:
            _check_one_launcher(environment, environ)
            return environment
    return Environment("single")


def _check_one_launcher(environment: Environment, environ: Mapping[str, str]) -> None:
    """Raise ``RuntimeError`` if the variables of two launchers contradict each other."""
    if environment.name in ("single", "kubernetes", "manual"):
        return
    set_besides = {name: environ[name] for name in TELLING if environ.get(name)}
    if environment.name not in Torchrun.launchers:
        values = dict(
            zip(
                TELLING,
                (environment.rank, environment.world_size, environment.local_rank, environment.local_world_size),
                strict=True,
            )
        )
        for name, text in set_besides.items():
            if text != str(values[name]):
                raise _contradiction(environment, set_besides, f"{name} is {text!r}")
        return
    if Torchrun.elastic(environ):
        return
    for starter in STARTERS:
        outer = _detected_or_none(starter, environ)
        if outer is None:
            continue
        # If there are more ranks than processes of mpirun or srun, each of those has started some ranks itself.
        if environment.world_size < outer.world_size or (
            environment.world_size == outer.world_size and environment.rank != outer.rank
        ):
            raise _contradiction(
                outer, set_besides, f"RANK is {environment.rank} and WORLD_SIZE is {environment.world_size}"
            )
        return


def _detected_or_none(starter: Detector, environ: Mapping[str, str]) -> Environment | None:
    """The environment that a launcher's variables describe; ``None`` if they are absent, or inconsistent (another launcher's may be complete)."""
    try:
        return starter.detect(environ)
    except RuntimeError:
        return None


def _contradiction(environment: Environment, torchrun_variables: Mapping[str, str], reason: str) -> RuntimeError:
    return RuntimeError(
        f"the environment describes two jobs: {environment.name} has started this process as rank {environment.rank} of {environment.world_size} "
        f"(local rank {environment.local_rank} of {environment.local_world_size}), but {reason}. "
        f"Read: {as_text(environment.variables)}; {as_text(torchrun_variables)}. "
        f"Unset {', '.join(name for name in torchrun_variables if name in TELLING)}: {environment.name}'s own variables suffice."
    )


def hints(environ: Mapping[str, str], environment: Environment) -> list[str]:
    """Notes for ``fit env`` about how ``environment`` was detected."""
    lines = []
    reason = why_no_task(environ)
    if environment.name == "single" and reason:
        lines.append(
            f"inside SLURM job {environ['SLURM_JOB_ID']}, but a single process, because {reason}; several ranks are started by: "
            "srun --ntasks N python script.py, or: fit launch --slurm script.py"
        )
    if environment.name == "single" and any(environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        lines.append("MASTER_ADDR or MASTER_PORT is set, but no rank: they are not used")
    if environment.name == "single" and environ.get("PET_NODE_RANK"):
        lines.append("the only pod of its job: a single process, which may start others by itself")
    outer_candidates = STARTERS if environment.name in Torchrun.launchers else ()
    outer_launchers = [starter for starter in outer_candidates if _detected_or_none(starter, environ)]
    lines += [f"{environment.name}'s variables win over {_set_names(starter, environ)}" for starter in outer_launchers]
    return lines


def _set_names(starter: Detector, environ: Mapping[str, str]) -> str:
    return ", ".join(name for name in starter.names if environ.get(name) and not name.startswith("MASTER_"))
