"""Detect ranks by torchrun's variables, which Torch Elastic, the launchers of DeepSpeed and Ray, and users also set."""

from __future__ import annotations

from collections.abc import Mapping

from engine.distributed.addresses import is_loopback
from engine.distributed.environments.environment import Environment, Variables

TELLING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Any of these variables tells that there is a job. The address alone does not: many notebooks have it as a leftover."""

_ADVICE = "Start the script with torchrun, which sets all of them, or unset them to train in this process alone."


class Torchrun:
    """Reads the complete set of torchrun's variables: of ``torchrun``, ``fit launch``, ``accelerate launch``, ``deepspeed``, Ray Train, and
    ``Fit(devices=n)``.

    An incomplete set is left to later detectors such as :class:`Manual`, because another launcher may provide the rest.
    """

    launchers = ("torchrun", "relaunch", "ray", "deepspeed")
    """The possible names of environments that this class returns."""
    required = (*TELLING, "MASTER_ADDR", "MASTER_PORT")
    names = (
        *required,
        *(
            "GROUP_WORLD_SIZE",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_ERROR_FILE",
        ),
        *("FIT_PARENT_PID", "LOCAL_SIZE", "CROSS_SIZE", "RAY_JOB_ID", "NODE_RANK"),
    )

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if not environ.get("RANK"):
            return None  # the usual case, without a look at the other variables
        read = Variables(environ, self.names, _ADVICE)
        # DeepSpeed's launcher sets LOCAL_SIZE and CROSS_SIZE instead of LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE.
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in read else "LOCAL_SIZE"
        if not all(
            name in read for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size, "MASTER_ADDR", "MASTER_PORT")
        ):
            return None
        rank, world_size = read.integer("RANK"), read.integer("WORLD_SIZE", minimum=1)
        local_rank, local_world_size = read.integer("LOCAL_RANK"), read.integer(local_size, minimum=1)
        read.require_less("RANK", rank, "WORLD_SIZE", world_size)
        read.require_less("LOCAL_RANK", local_rank, local_size, local_world_size)
        if local_world_size > world_size:
            raise read.error(f"{local_size} must not exceed WORLD_SIZE")
        # GROUP_WORLD_SIZE counts torchrun's agents, one per node; nodes may have different numbers of processes.
        nodes = read.integer("GROUP_WORLD_SIZE", "CROSS_SIZE", minimum=1, default=-(-world_size // local_world_size))
        if nodes > world_size:
            raise read.error(f"{nodes} nodes cannot share {world_size} process(es)")
        return Environment(
            name=self._name(read),
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            num_nodes=nodes,
            master_addr=read.text("MASTER_ADDR"),
            master_port=read.port("MASTER_PORT"),
            agent_store=read.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=read.integer("TORCHELASTIC_RESTART_COUNT", default=0),
            parent_pid=read.integer("FIT_PARENT_PID", minimum=1) if "FIT_PARENT_PID" in read else None,
            error_file=read.text("TORCHELASTIC_ERROR_FILE"),
            binds_devices=self._name(read) == "ray",
            variables=read.values,
        )

    @staticmethod
    def _name(read: Variables) -> str:
        if "FIT_PARENT_PID" in read:
            return "relaunch"
        if "TORCHELASTIC_RUN_ID" in read:
            return "torchrun"
        if "RAY_JOB_ID" in read and "NODE_RANK" in read:
            return "ray"
        return "torchrun" if "LOCAL_WORLD_SIZE" in read else "deepspeed"

    @staticmethod
    def elastic(environ: Mapping[str, str]) -> bool:
        """Whether a launcher has set the variables for this very process, so that variables of outer launchers do not matter."""
        return any(environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "FIT_PARENT_PID", "CROSS_SIZE"))


class Manual:
    """Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set by hand, as for ``init_process_group("env://")``.

    Without ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` the local rank is known only if there is one process, or if the address is a loopback
    address: all processes are then on this machine, and the local rank is the rank. Anything else is an error.
    """

    names = Torchrun.required

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if not any(environ.get(name) for name in TELLING):
            return None
        read = Variables(
            environ,
            (*self.names, "GROUP_WORLD_SIZE", "FIT_PARENT_PID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
            self._advice(environ),
        )
        if "LOCAL_RANK" in read or "LOCAL_WORLD_SIZE" in read:
            read.require(*self.names)
        read.require("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, world_size = read.integer("RANK"), read.integer("WORLD_SIZE", minimum=1)
        read.require_less("RANK", rank, "WORLD_SIZE", world_size)
        address = read.text("MASTER_ADDR")
        if world_size > 1 and not is_loopback(address):
            raise read.error(
                f"LOCAL_RANK, LOCAL_WORLD_SIZE are not set, and MASTER_ADDR is not 127.0.0.1, so it is unknown which of the {world_size} "
                "processes are on this machine"
            )
        return Environment(
            "manual",
            rank,
            world_size,
            rank,
            world_size,
            1,
            address,
            read.port("MASTER_PORT"),
            binds_devices=True,
            variables=read.values,
        )

    @staticmethod
    def _advice(environ: Mapping[str, str]) -> str:
        if environ.get("SLURM_JOB_ID") and not environ.get("SLURM_STEP_ID"):
            return (
                "This is SLURM job "
                + environ["SLURM_JOB_ID"]
                + ", but the process was not started by srun: start the script with srun, "
                "which needs none of them, or unset them to train in this process alone."
            )
        return _ADVICE
