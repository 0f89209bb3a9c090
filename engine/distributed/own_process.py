"""This process's state in its job: the process groups that it has joined, the ranks that it has started, and how it leaves without an abort."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch.distributed as dist

from engine.distributed import process_groups
from engine.distributed.environments import Environment
from engine.utils import torch_private
from engine.utils.log import logger

LEAVE_S = 5.0
"""Seconds that a process that ends normally waits for the other ranks; without this wait about 15 % of FSDP2 runs abort at exit."""


@dataclass(eq=False)
class JoinedGroups:
    """Torch's default group in this process and our state for it, shared by every ``Group`` of the process."""

    world: dist.ProcessGroup
    cpu: dist.ProcessGroup
    store: dist.Store  # the store of the rendezvous
    created_here: bool  # False: the user has initialised the default group, and must destroy it
    pid: int
    debug: bool  # whether the groups compare the shapes of each collective
    failed: bool = False
    made_objects: dict[Hashable, object] = field(default_factory=dict)  # results of Group.made_once


@dataclass(frozen=True, eq=False)
class StartedJob:
    """The job whose other ranks this process, rank 0, has started itself (``engine.launch.script_ranks``)."""

    environment: Environment
    """The environment of rank 0."""
    store: dist.Store
    """The store in which the ranks meet."""
    pid: int = field(default_factory=os.getpid)
    """The process id of rank 0; forks of that process have another one."""


class OwnProcess:
    """The state of this process: what it has joined and started, and whether it has run alone. The only object is :data:`own_process`."""

    joined: JoinedGroups | None = None
    """The process groups of the job; ``None`` for a job of one process, and after :meth:`leave`."""
    ran_alone = False
    """Whether this process has run without other ranks. Then none can be started: running the same script, they would reach that run first."""
    _started: StartedJob | None = None

    @property
    def started(self) -> StartedJob | None:
        """The job whose ranks this process has started; ``None`` if it has started none, and in forked processes."""
        return self._started if self._started is not None and self._started.pid == os.getpid() else None

    @started.setter
    def started(self, job: StartedJob) -> None:
        self._started = job

    def leave(self) -> None:
        """Leave the job: destroy the default group if it is ours, and wait until gloo's threads sleep. Repeated calls do nothing."""
        joined, self.joined = self.joined, None
        if joined is None or joined.pid != os.getpid():
            return
        if joined.created_here and joined.world is dist.group.WORLD:
            _leave_together(joined)
        process_groups.wait_before_exit()


def _leave_together(joined: JoinedGroups) -> None:
    """Destroy the default group once all ranks have reached this point. If this process ends with an error, keep the group rather than wait."""
    # The interpreter sets these when it prints an uncaught exception (last_exc from Python 3.12 on).
    if joined.failed or getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None:
        _leak_groups()
        return
    try:
        if _all_leave(joined.store, dist.get_world_size()):
            dist.barrier(group=joined.cpu)
        else:
            _leak_groups()
        process_groups.destroy()
    except (RuntimeError, dist.DistError) as error:  # another rank has waited longer than LEAVE_S and is gone
        logger.debug("leaving alone: %s", error)
        _leak_groups()


def _leak_groups() -> None:
    """Keep torch's process groups alive forever: their destructors would wait, up to the timeout, for collectives that other ranks never join."""
    for process_group in torch_private.process_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def _all_leave(store: dist.Store, world_size: int) -> bool:
    """Whether all ranks have reached this point within ``LEAVE_S``. The store is used because a collective that a rank never joins would block.

    All ranks get the same answer, the first one that any rank gives: a rank that has given up must not be waited for by later ones.
    """
    deadline = time.monotonic() + LEAVE_S
    try:
        arrived = store.add("left", 1)
        while arrived < world_size and time.monotonic() < deadline:
            time.sleep(0.005)
            arrived = store.add("left", 0)
        answer: bytes = store.compare_set("leave", "", "together" if arrived >= world_size else "alone")
    except (RuntimeError, dist.DistError) as error:
        logger.debug("leaving alone: %s", error)
        return False
    return answer == b"together"


own_process = OwnProcess()
