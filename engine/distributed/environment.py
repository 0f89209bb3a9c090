"""Which process of which job this is, read from the variables that a launcher leaves in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Environment:
    """One process's place in its job. Read it with :func:`detect`."""

    name: str
    """Who launched the process: ``"single"`` (nobody), ``"torchrun"``, or ``"relaunch"`` (rank 0 of a ``Fit(devices=n)``)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    """The launcher serves the store at ``master_addr:master_port`` already, so rank 0 must not."""
    restart_count: int = 0
    """How often the launcher has restarted the job: keys left in its store by an earlier attempt must not be met."""
    parent_pid: int | None = None
    """The process without which this one shall not live (rank 0 of a relaunched job)."""
    error_file: str | None = None
    """Where the launcher looks for the traceback of this process (Torch Elastic's JSON)."""


class Detector(Protocol):
    """One kind of launcher. ``None`` when its variables are absent, ``RuntimeError`` when they make no sense."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None: ...


class Torchrun:
    """``torchrun``, ``python -m torch.distributed.run``, ``accelerate launch``, and the ranks that a relaunch starts."""

    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # The address alone is a leftover of many notebooks and says nothing about other processes.
    telling = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        if not any(environ.get(name) for name in self.telling):
            return None
        missing = [name for name in self.required if not environ.get(name)]
        if missing:
            raise self._error(environ, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set")
        rank, world_size = self._integer(environ, "RANK", 0), self._integer(environ, "WORLD_SIZE", 1)
        local_rank, local_world_size = self._integer(environ, "LOCAL_RANK", 0), self._integer(environ, "LOCAL_WORLD_SIZE", 1)
        port = self._integer(environ, "MASTER_PORT", 1)
        for wrong, reason in (
            (rank >= world_size, "RANK must be less than WORLD_SIZE"),
            (local_rank >= local_world_size, "LOCAL_RANK must be less than LOCAL_WORLD_SIZE"),
            (local_world_size > world_size, "LOCAL_WORLD_SIZE must not exceed WORLD_SIZE"),
            (port > 65535, "MASTER_PORT must not exceed 65535"),
        ):
            if wrong:
                raise self._error(environ, reason)
        return Environment(
            name="relaunch" if environ.get("FIT_PARENT_PID") else "torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            # torchrun's groups are its agents, one a node; nodes may have unequal numbers of processes.
            num_nodes=self._integer(environ, "GROUP_WORLD_SIZE", 1, default=-(-world_size // local_world_size)),
            master_addr=environ["MASTER_ADDR"],
            master_port=port,
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=self._integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
            parent_pid=self._integer(environ, "FIT_PARENT_PID", 1) if environ.get("FIT_PARENT_PID") else None,
            error_file=environ.get("TORCHELASTIC_ERROR_FILE") or None,
        )

    def _integer(self, environ: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
        text = environ.get(name)
        if not text and default is not None:
            return default
        try:
            value = int(text or "")
        except ValueError:
            raise self._error(environ, f"{name} must be a whole number") from None
        if value < least:
            raise self._error(environ, f"{name} must be at least {least}")
        return value

    def _error(self, environ: Mapping[str, str], reason: str) -> RuntimeError:
        read = ", ".join(f"{name}={environ[name]!r}" for name in (*self.required, "GROUP_WORLD_SIZE", "FIT_PARENT_PID") if name in environ)
        return RuntimeError(
            f"the environment describes a distributed job, but {reason}. Read: {read}. "
            "Start the script with torchrun, which sets all of them, or unset them to train in this process alone."
        )


DETECTORS: tuple[Detector, ...] = (Torchrun(),)
"""Asked in this order; the first that knows the environment describes it."""


def detect(environ: Mapping[str, str]) -> Environment:
    """This process's place in its job, from ``environ`` (usually ``os.environ``, which is only read).

    Without any launcher's variables it is ``Environment("single")``: world size 1. An empty variable counts as unset.

    Raises:
        RuntimeError: the variables of a launcher are incomplete or contradict each other; the message shows those read.
    """
    for detector in DETECTORS:
        found = detector.detect(environ)
        if found is not None:
            return found
    return Environment("single")
