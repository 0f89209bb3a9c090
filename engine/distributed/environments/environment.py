"""A process's rank and job, and how they are read from variables: every error shows the variables that were read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.utils.text import terminal_text


@dataclass(frozen=True)
class Environment:
    """One process's rank, job and addresses. ``engine.distributed.environments.detect`` reads them from the environment.

    ``rank`` is the process's number among the ``world_size`` processes of the job, ``local_rank`` its number among the ``local_world_size``
    processes on its machine, one of ``num_nodes`` machines. The processes meet at ``master_addr`` and ``master_port``.

    Raises:
        ValueError: the numbers contradict each other.
    """

    name: str
    """The launcher of the process: ``"single"`` (none), ``"torchrun"``, ``"relaunch"`` (rank 0 of a ``Fit(devices=n)``), ``"openmpi"``,
    ``"mpich"``, ``"mvapich"``, ``"slurm"``, ``"kubernetes"``, ``"ray"``, ``"deepspeed"``, or ``"manual"`` (variables set by hand)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """Whether the launcher serves the store at ``master_addr:master_port``, so that rank 0 must not serve one."""
    restart_count: int = 0
    """How often the launcher has restarted the job, as far as this machine knows."""
    parent_pid: int | None = None
    """The process with which this one must end: rank 0 of a job that ``Fit(devices=n)`` has started."""
    error_file: str | None = None
    """The file in which the launcher looks for this process's traceback (Torch Elastic's JSON)."""
    binds_devices: bool = False
    """Whether the launcher may show each process only its own device (``srun --gpus-per-task``), so that a single visible device is its own."""
    variables: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The variables from which the environment was read."""

    def __post_init__(self) -> None:
        port, address = self.master_port, self.master_addr or ""
        for wrong, reason in (
            (self.world_size < 1, f"world_size={self.world_size} must be at least 1"),
            (
                not 0 <= self.rank < self.world_size,
                f"rank={self.rank} must be at least 0 and less than world_size={self.world_size}",
            ),
            (
                not 0 <= self.local_rank < self.local_world_size,
                f"local_rank={self.local_rank} must be at least 0 and less than local_world_size={self.local_world_size}",
            ),
            (
                self.local_world_size > self.world_size,
                f"local_world_size={self.local_world_size} must not exceed world_size={self.world_size}",
            ),
            (
                not 1 <= self.num_nodes <= self.world_size,
                f"num_nodes={self.num_nodes} must be at least 1 and at most world_size={self.world_size}",
            ),
            (
                not address.isprintable() or len(address) > 255,
                f"master_addr={address[:255]!r} is not the name of a machine",
            ),
            (port is not None and not 0 <= port <= 65535, f"master_port={port} must be at most 65535"),
        ):
            if wrong:
                raise ValueError(f"Environment({self.name!r}): {reason}")


class Detector(Protocol):
    """One kind of launcher: ``Torchrun``, ``Manual``, ``Mpi``, ``Slurm`` or ``Kubernetes``, in the modules beside this one."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all variables that the detector reads."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """Read this process's rank and job; ``None`` if the launcher's variables are absent.

        Raises:
            RuntimeError: the launcher's variables are inconsistent.
        """


class Variables:
    """Reads and checks the variables of one launcher; an empty variable counts as unset.

    Args:
        environ: all variables.
        names: the names of this launcher's variables, which errors show.
        advice: the last sentence of errors, which says what to do.
    """

    def __init__(self, environ: Mapping[str, str], names: Sequence[str], advice: str) -> None:
        self.values = {name: environ[name] for name in names if name in environ}
        self._advice = advice

    def __contains__(self, name: str) -> bool:
        return bool(self.values.get(name))

    def text(self, *names: str) -> str | None:
        """The value of the first of ``names`` that is set; ``None`` if none is."""
        return next((self.values[name] for name in names if self.values.get(name)), None)

    def integer(self, *names: str, minimum: int = 0, default: int | None = None) -> int:
        """The value of the first of ``names`` that is set, as a number.

        Raises:
            RuntimeError: none is set and there is no default, or the value is not a number or is too small.
        """
        name = next((name for name in names if self.values.get(name)), None)
        if name is None:
            if default is None:
                raise self.error(f"{' or '.join(names)} is not set")
            return default
        try:
            value = int(self.values[name])
        except ValueError:
            raise self.error(f"{name} must be a whole number") from None
        if value < minimum:
            raise self.error(f"{name} must be at least {minimum}")
        return value

    def require(self, *names: str) -> None:
        """Raise ``RuntimeError`` if some of ``names`` are not set; the message lists them."""
        missing = [name for name in names if not self.values.get(name)]
        if missing:
            raise self.error(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set")

    def require_less(self, name: str, value: int, bound_name: str, bound: int) -> None:
        """Raise ``RuntimeError`` unless ``value < bound``."""
        if value >= bound:
            raise self.error(f"{name} must be less than {bound_name}")

    def port(self, *names: str, default: int | None = None) -> int:
        """The value of the first of ``names`` that is set, as a port number."""
        value = self.integer(*names, minimum=1, default=default)
        if value > 65535:
            raise self.error(f"{names[0]} must not exceed 65535")
        return value

    def error(self, reason: str) -> RuntimeError:
        """Create an error that says what is wrong, what was read, and what to do."""
        text = (
            f"the environment describes a distributed job, but {reason}. Read: {as_text(self.values)}. {self._advice}"
        )
        return RuntimeError(terminal_text(text, one_line=True))


def as_text(variables: Mapping[str, str]) -> str:
    """Format variables as ``NAME='value', ...`` for a message."""
    return ", ".join(f"{name}={value[:200]!r}" for name, value in variables.items()) or "nothing"


def derived_port(*marks: object) -> int:
    """A port from 10000 to 29999 (below the ephemeral ports) that is computed from ``marks``, so that all ranks get the same one."""
    return 10000 + zlib.crc32("/".join(map(str, marks)).encode()) % 20000
