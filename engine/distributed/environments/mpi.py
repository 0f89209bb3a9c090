"""Detect ranks by the variables that ``mpirun`` sets. MPI only starts the processes; torch connects them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.distributed.addresses import LOOPBACK
from engine.distributed.environments.environment import Environment, Variables, derived_port


@dataclass(frozen=True)
class Mpi:
    """The names of an MPI implementation's variables; several names for one value are those of different versions."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    """Variables whose value is shared by all processes of one ``mpirun``, on all machines, and by no others."""
    forward: str = ""
    """The option by which its ``mpirun`` passes a variable to all processes."""
    telling: tuple[str, ...] = ()
    """Variables of which at least one must be set besides ``rank``, because other launchers set ``rank`` too."""

    @property
    def names(self) -> tuple[str, ...]:
        return (
            self.rank,
            self.size,
            *self.local_rank,
            *self.local_size,
            *self.nodes,
            *self.job,
            "MASTER_ADDR",
            "MASTER_PORT",
        )

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if not environ.get(self.rank) or (self.telling and not any(environ.get(name) for name in self.telling)):
            return None
        read = Variables(
            environ,
            self.names,
            f"Start the script with mpirun; it passes variables on with: {self.forward.format('NAME', 'VALUE')}.",
        )
        rank, world_size = read.integer(self.rank), read.integer(self.size, minimum=1)
        local_rank, local_world_size = read.integer(*self.local_rank), read.integer(*self.local_size, minimum=1)
        read.require_less(self.rank, rank, self.size, world_size)
        read.require_less(" or ".join(self.local_rank), local_rank, " or ".join(self.local_size), local_world_size)
        if local_world_size > world_size:
            raise read.error(f"{' or '.join(self.local_size)} must not exceed {self.size}")
        address, port = read.text("MASTER_ADDR"), read.port("MASTER_PORT", default=0) if "MASTER_PORT" in read else None
        is_one_machine = local_world_size == world_size
        if address is None and not is_one_machine:
            raise read.error(
                f"it spans several machines ({local_world_size} of {world_size} processes are here), and MASTER_ADDR is not set. Give all of them "
                f"the address of the machine of rank 0: mpirun {self.forward.format('MASTER_ADDR', 'HOST')} ..."
            )
        if port is None and world_size > 1:
            port = self._port(read, is_one_machine)
        return Environment(
            self.name,
            rank,
            world_size,
            local_rank,
            local_world_size,
            1
            if is_one_machine
            else min(world_size, read.integer(*self.nodes, minimum=1, default=-(-world_size // local_world_size))),
            address or LOOPBACK,
            port,
            binds_devices=True,
            variables=read.values,
        )

    def _port(self, read: Variables, is_one_machine: bool) -> int:
        job = read.text(*self.job)
        if job is None and not is_one_machine:
            raise read.error(
                f"MASTER_PORT is not set. Give one to all processes: mpirun {self.forward.format('MASTER_PORT', '29500')} ..."
            )
        return derived_port(self.name, job if job is not None else _launcher(self.rank))


OPEN_MPI = Mpi(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    nodes=("OMPI_MCA_orte_num_nodes",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    forward="-x {}={}",
)
MVAPICH = Mpi(
    "mvapich",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",),
    forward="-genv {} {}",
)
MPICH = Mpi(
    "mpich",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    forward="-genv {} {}",
    telling=("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""MPICH, Intel MPI, other implementations with Hydra, and Cray's. PMI_RANK and PMI_SIZE alone do not suffice: ``srun --mpi=pmi2`` sets them, too."""


def _launcher(mark: str) -> int:
    """The process that started all ranks on this machine: the nearest ancestor without ``mark`` among its variables, unlike shells and wrappers."""
    pid = os.getppid()
    while True:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # The program's name, in brackets, may contain anything, even spaces and brackets.
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # not Linux, or another user's process
            return pid
        if not any(variable.startswith(f"{mark}=".encode()) for variable in variables) or parent < 1:
            return pid
        pid = parent
