"""Detect tasks of ``srun``. A shell inside an allocation, a batch script and a notebook are single processes, not rank 0 of several.

SLURM writes lists in a compact form: ``node[001-003,007],gpu1`` for names, ``2(x3),1`` for numbers. A short text can expand to more than
fits into memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from engine.distributed.addresses import LOOPBACK
from engine.distributed.environments.environment import Environment, Variables, derived_port

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""The smallest step number of batch scripts, interactive steps and external steps."""
_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_FIRST_NODE = re.compile(rf"[^\s\[\],]+(?:{_RANGES}[^\s\[\],]*)*(?=,|\Z)")
_MOST_NODES = 1_000_000
"""The maximum number of nodes in a list, more than any cluster has."""


class Slurm:
    """Detects a task of a job step with several tasks, including heterogeneous jobs with one step over all components."""

    names = (
        *(
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_GTIDS",
            "SLURM_PTY_PORT",
        ),
        *(
            "SLURM_STEP_NUM_TASKS",
            "SLURM_NTASKS",
            "SLURM_STEP_NUM_NODES",
            "SLURM_NNODES",
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_TASKS_PER_NODE",
        ),
        *("SLURM_STEP_NODELIST", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    )

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if why_no_task(environ) is not None:
            return None
        read = Variables(environ, self.names, "Start the script with srun, which sets all of them.")
        rank, world_size = read.integer("SLURM_PROCID"), read.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", minimum=1)
        nodes, node = (
            read.integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", minimum=1),
            read.integer("SLURM_NODEID", default=0),
        )
        local_rank = read.integer("SLURM_LOCALID")
        read.require_less("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", world_size)
        read.require_less("SLURM_NODEID", node, "SLURM_STEP_NUM_NODES", nodes)
        local_world_size = world_size if nodes == 1 else _tasks(read, world_size, nodes)[node]
        read.require_less("SLURM_LOCALID", local_rank, f"the {local_world_size} task(s) of this node", local_world_size)
        port = read.port(
            "MASTER_PORT", default=derived_port("slurm", read.text("SLURM_JOB_ID"), read.text("SLURM_STEP_ID"))
        )
        return Environment(
            "slurm",
            rank,
            world_size,
            local_rank,
            local_world_size,
            nodes,
            read.text("MASTER_ADDR") or (LOOPBACK if nodes == 1 else _read_first_node(read)),
            port,
            restart_count=read.integer("SLURM_RESTART_COUNT", default=0),
            binds_devices=True,
            variables=read.values,
        )


def why_no_task(environ: Mapping[str, str]) -> str | None:
    """The reason why this process counts as a single one; empty if it is not in a SLURM job; ``None`` if it is one of several tasks started by
    ``srun``."""
    if not environ.get("SLURM_JOB_ID"):
        return ""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if not step or not environ.get("SLURM_PROCID"):
        return "it was not started by srun"
    if re.fullmatch(r"\d{1,20}", step) and int(step) >= _FIRST_SPECIAL_STEP:
        return "it runs in an interactive shell, not in a step of srun"
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    if tasks == "1":
        return "the step has one task"
    # sbatch passes its environment on: a batch script submitted from within a step has that step's numbers, but is a single process.
    local_tasks = environ.get("SLURM_GTIDS")
    if local_tasks and environ["SLURM_PROCID"] not in local_tasks.split(","):
        return "SLURM_STEP_ID is another step's"
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if local_tasks and counts and re.fullmatch(r"\d{1,9}", environ.get("SLURM_NODEID", "")):
        try:
            expected = expand_counts(counts)
        except ValueError:
            return None  # Slurm.detect reports it as an error
        node = int(environ["SLURM_NODEID"])
        if node < len(expected) and expected[node] != len(local_tasks.split(",")):
            return "SLURM_STEP_ID is another step's: the job was submitted from within a step"
    # A step that is started from a shell of `srun --pty` inherits the variable, but not the terminal.
    if environ.get("SLURM_PTY_PORT") and _has_terminal():
        return "it runs in a shell of srun --pty"
    return None


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tasks(read: Variables, world_size: int, nodes: int) -> list[int]:
    """The number of tasks on each node."""
    text = read.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if text is None:
        raise read.error("SLURM_STEP_TASKS_PER_NODE is not set")
    try:
        counts = expand_counts(text)
    except ValueError as error:
        raise read.error(str(error)) from None
    if len(counts) != nodes or sum(counts) != world_size:
        raise read.error(
            f"{text[:200]!r} means {sum(counts)} tasks on {len(counts)} nodes, where there are {world_size} on {nodes}"
        )
    return counts


def _read_first_node(read: Variables) -> str:
    text = read.text("SLURM_STEP_NODELIST")
    if text is None:
        raise read.error("neither SLURM_STEP_NODELIST nor MASTER_ADDR is set")
    try:
        return first_node(text)
    except ValueError as error:
        raise read.error(f"{error}; or set MASTER_ADDR to the machine of rank 0") from None


def first_node(text: str) -> str:
    """The first name in a list of nodes: ``"node[001-003,007],gpu1"`` -> ``"node001"``, with its leading zeros.

    Raises:
        ValueError: ``text`` is not a list of nodes.
    """
    match = _FIRST_NODE.match(text)
    if match is None:
        raise ValueError(f"{text[:200]!r} is not a list of nodes")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def expand_counts(text: str) -> list[int]:
    """Expand a list of counts: ``"2(x3),1"`` -> ``[2, 2, 2, 1]``.

    Raises:
        ValueError: ``text`` is not a list of counts, or has more than a million.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            raise ValueError(
                f"{text[:200]!r} is not a list of counts: {part[:200]!r} is neither a number nor of the form 2(x3)"
            )
        times = int(match[2] or 1)
        if len(counts) + times > _MOST_NODES:
            raise ValueError(f"{text[:200]!r} is not a list of counts: it has more than {_MOST_NODES:,} nodes")
        counts += [int(match[1])] * times
    return counts
