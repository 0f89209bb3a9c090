"""The processes of one job: joining, barriers, and leaving without an abort."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.distributed import failures, process_groups, stores
from engine.distributed.environment import Environment, detect
from engine.distributed.meeting import meet
from engine.distributed.own_process import own_process
from engine.utils import accelerator as accelerators
from engine.utils import torch_private
from engine.utils.log import logger

LEAVE_S = 5.0
"""How long a process that ends normally waits for the others (s); otherwise about 15 % of FSDP2 runs abort at exit."""


@dataclass(eq=False)
class _Shared:
    """torch's default group in this process, and our state for it: shared by every ``Group`` of the process."""

    world: dist.ProcessGroup
    cpu: dist.ProcessGroup
    store: dist.Store  # of the rendezvous
    ours: bool  # False: the user initialised the default group, and destroys it
    pid: int
    debug: bool  # its groups compare each collective's shapes
    failed: bool = False
    made: dict[Hashable, object] = field(default_factory=dict)  # by Group.once


Made = TypeVar("Made")
_shared: _Shared | None = None
_stores: dict[tuple[str, int], dist.Store] = {}  # rank 0's port stays bound until the process ends


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device, as strategies and transforms ask for it."""

    type: str = "cpu"
    """As torch names it."""
    has_fp8: bool = False
    """Whether it multiplies matrices in fp8 itself."""

    @property
    def is_accelerator(self) -> bool:
        """Whether it has memory of its own."""
        return self.type != "cpu"


class Group:
    """The processes of one job. Created by :func:`join`.

    ``rank``, ``world_size``, ``local_rank``, ``is_main`` (rank 0) and ``device`` (of this process) are plain
    attributes. ``cpu`` is a gloo process group besides the default one, for flags, sizes, objects and CPU tensors, so that these never
    mix with the gradients' collectives; ``None`` with one process, and then every collective is a no-op. ``wide`` is the
    process group for the device's tensors; ``None`` is torch's default one.
    """

    __slots__ = ("_shared", "cpu", "device", "environment", "is_main", "local_rank", "rank", "wide", "world_size")

    def __init__(self, environment: Environment, device: torch.device, shared: _Shared | None = None) -> None:
        self.environment = environment
        self.device = device
        self.rank, self.world_size, self.local_rank = environment.rank, environment.world_size, environment.local_rank
        self.is_main = environment.rank == 0
        self.cpu: dist.ProcessGroup | None = shared.cpu if shared else None
        self.wide: dist.ProcessGroup | None = None
        self._shared = shared

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that each rank of the job has."""
        return DeviceKind(self.device.type, accelerators.has_fp8(self.device))

    @property
    def failed(self) -> bool:
        """Set to True after an error: then the process leaves without waiting for the others. The next ``join`` clears it."""
        return self._shared is not None and self._shared.failed

    @failed.setter
    def failed(self, value: bool) -> None:
        if self._shared is not None:
            self._shared.failed = value

    @property
    def store(self) -> dist.Store | None:
        """The store of the rendezvous; ``None`` with one process."""
        return self._shared.store if self._shared is not None else None

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives in all process groups. Those that have started keep theirs."""
        if self.cpu is not None:
            for group in torch_private.process_groups():
                torch_private.set_timeout(group, timeout)

    def part(self, parts: Sequence[Sequence[int]]) -> Group:
        """The subgroup in ``parts`` that contains this rank, with ranks from 0. A collective; every rank is in exactly one."""
        cpu, wide = self.once(("part", *map(tuple, parts)), lambda: self._groups(parts))
        ranks = next(part for part in parts if self.rank in part)
        found = Group(self.environment, self.device, self._shared)
        found.rank, found.world_size = ranks.index(self.rank), len(ranks)
        found.is_main, found.cpu, found.wide = found.rank == 0, cpu, wide
        return found

    def _groups(self, parts: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The process groups of this rank's subgroup: for CPU tensors and for the device's."""
        shared = [ranks for ranks in parts if len(ranks) > 1]
        cpu = process_groups.on_cpu(shared) if shared else None
        return cpu, cpu if self.device.type == "cpu" or not shared else self.divided(parts)

    def divided(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The process group for the device's tensors of this rank's part, made once; ``None`` for a rank in no part. A collective.

        It has no gloo beside it. A part with all ranks is torch's default group.
        """
        if len(parts) == 1 and sorted(parts[0]) == list(range(dist.get_world_size())):
            return dist.group.WORLD
        key = ("divided", *(tuple(ranks) for ranks in parts))
        return self.once(key, lambda: process_groups.divided(parts, self.device))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The result of ``make`` at the first call with this key, kept for the life of the job: meshes and process groups.

        Each process group has its own threads and sockets, and a sharded module uses its mesh also after the run: so runs
        share them, and do not leak them.
        """
        if self._shared is None:
            return make()
        if key not in self._shared.made:
            self._shared.made[key] = make()
        return self._shared.made[key]  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank calls this. On the CPU: it does not wait for work queued on a device."""
        if self.cpu is not None:
            dist.barrier(group=self.cpu)

    def close(self) -> None:
        """Leave the job now rather than at the interpreter's exit, for every ``Group`` of this process. Repeated calls do nothing.

        A default group that the user initialised is kept.
        """
        if self._shared is not None and self._shared is _shared:
            _leave()
        self._shared = self.cpu = None


def join(
    environment: Environment,
    device: torch.device,
    *,
    timeout: timedelta,
    store: dist.Store | None = None,
    check: Callable[[], None] | None = None,
    debug: bool = False,
) -> Group:
    """Join the other processes of the job; all of them call this.

    World size 1 creates no process group. Otherwise torch's default group is initialised (gloo for CPU tensors, the device's own back end
    for others, such as NCCL), or reused if the user or an earlier ``join`` has initialised it. Ours is destroyed at the interpreter's exit.

    Args:
        environment: this process's rank, world size and addresses.
        device: of this process; ``torch.device("cuda", i)`` must be the current CUDA device already.
        timeout: for joining, and later for each collective.
        store: for the rendezvous; by default served at the environment's master address and port.
        check: called on rank 0 about ten times a second while it waits for others; it may raise.
        debug: from now on each collective first compares operation, shapes and dtypes over the ranks, and raises where they differ
            (torch's ``DebugLevel.DETAIL``); for all groups of this process, at the cost of a small collective for each.

    Raises:
        ValueError: ``debug`` with a default group that was created without it.
        RuntimeError: the others did not join in time, the address cannot be served or reached, the default group that exists has
            another rank or size than the environment says, or the process may not open as many connections as the job needs.
    """
    global _shared
    failures.attach(environment)
    if dist.is_initialized():
        _check_existing(environment)
        connected = environment.world_size > 1 or (_shared is not None and _shared.world is dist.group.WORLD)
        return Group(environment, device, _existing(timeout, debug) if connected else None)
    if environment.world_size == 1:
        if environment.name == "single":
            own_process.ran_alone = True
        return Group(environment, device)
    failures.refuse_imported_script()
    process_groups.allow_descriptors(environment.world_size)
    prefixed = _meet(environment, timeout, store, check)
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # also for groups that are created later
    process_groups.initialise(
        device,
        prefixed,
        environment.rank,
        environment.world_size,
        timeout,
        dist.get_debug_level() == dist.DebugLevel.DETAIL,
        hook=failures.hook(environment),
    )
    _shared = _adopt(timeout, prefixed, debug or dist.get_debug_level() == dist.DebugLevel.DETAIL)
    return Group(environment, device, _shared)


def alone(device: torch.device, *, timeout: timedelta) -> Group:
    """A job of one process that does run its collectives, in the device's back end: for checks of it on a machine with one device.

    Later runs of this process join it: DDP reduces, FSDP shards, and checkpoints are agreed on, over one rank.
    """
    global _shared
    store = dist.HashStore()
    process_groups.initialise(device, store, 0, 1, timeout, debug=False)
    _shared = _adopt(timeout, store, debug=False)
    return Group(Environment("single"), device, _shared)


def _existing(timeout: timedelta, debug: bool) -> _Shared:
    """What the groups of this process share, on the default group that is there."""
    global _shared
    if _shared is None or _shared.world is not dist.group.WORLD:
        _shared = _adopt(timeout, None, dist.get_debug_level() == dist.DebugLevel.DETAIL)
    if debug and not _shared.debug:
        raise ValueError(
            "debug=True was requested, but this process's collectives were set up without it: give it to the first Fit or Engine of the "
            "process, or set TORCH_DISTRIBUTED_DEBUG=DETAIL before init_process_group"
        )
    _shared.failed = False  # an earlier run's error was handled, or this run would not start
    return _shared


def own_environment(given: Environment | None = None) -> Environment:
    """Where this process stands: as it was given, as an earlier ``Fit`` of this process has arranged it, or as the launcher's variables say.

    From here on an error that ends this process is recorded for the launcher.
    """
    started = own_process.started
    found = given or (started.environment if started else detect(os.environ))
    failures.attach(found)
    return found


def join_here(environment: Environment, accelerator: str, *, timeout: timedelta, debug: bool) -> Group:
    """:func:`join` on this process's own device, with the processes that an earlier ``Fit`` has started, if it has.

    Raises:
        ValueError, RuntimeError: the accelerator is unknown or not there; or as :func:`join`.
    """
    kind, started = accelerators.device_type(accelerator), own_process.started
    device = accelerators.device(kind, environment.local_rank, own=environment.binds_devices)
    return join(environment, device, timeout=timeout, store=started.store if started else None, debug=debug)


def _check_existing(environment: Environment) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (environment.rank, environment.world_size):
        raise RuntimeError(
            f"torch.distributed is initialised already as rank {rank} of {world_size}, but the environment ({environment.name}) says rank "
            f"{environment.rank} of {environment.world_size}. Start the processes with torchrun, or set its variables (RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) in each of them before init_process_group."
        )


def _adopt(timeout: timedelta, store: dist.Store | None, debug: bool) -> _Shared:
    world = dist.group.WORLD
    assert world is not None
    cpu = process_groups.on_cpu(timeout=timeout)
    assert cpu is not None
    # Handlers run last in, first out: ours must run before those that serve the store or wait for our exit.
    atexit.unregister(_leave)
    atexit.register(_leave)
    theirs = store or world.get_group_store()
    return _Shared(world, cpu, theirs, store is not None, os.getpid(), debug)


def _meet(
    environment: Environment, timeout: timedelta, store: dist.Store | None, check: Callable[[], None] | None
) -> dist.Store:
    """The store, after rank 0 has seen all ranks of this attempt."""
    where = f"{environment.master_addr}:{environment.master_port}"
    who = f"rank {environment.rank} of {environment.world_size}"
    if store is None:
        store = _open(environment, timeout, where, who)
    return meet(store, environment.rank, environment.world_size, where, timeout=timeout, check=check)


def _open(environment: Environment, timeout: timedelta, where: str, who: str) -> dist.Store:
    if environment.master_addr is None or environment.master_port is None:
        raise RuntimeError(
            f"{who} does not know the address of the others: {environment!r} has no master_addr or no master_port"
        )
    key = (environment.master_addr, environment.master_port)
    serves = environment.rank == 0 and not environment.agent_store
    if key not in _stores:
        try:
            if serves and environment.local_world_size == environment.world_size:
                _stores[key] = stores.serve(*key, timeout=timeout, world_size=environment.world_size)
            else:
                _stores[key] = dist.TCPStore(
                    *key,
                    environment.world_size,
                    is_master=serves,
                    timeout=timeout,
                    wait_for_workers=False,
                    multi_tenant=serves,
                )
        except dist.DistError as error:
            todo = (
                "Another program may hold the port: choose another MASTER_PORT."
                if serves
                else "Is rank 0 running there, and is the address right as seen from this machine?"
            )
            raise RuntimeError(
                f"{who} could not {'serve' if serves else 'reach'} the job's store at {where}: {error}. {todo}"
            ) from error
    return _stores[key]


def _leave() -> None:
    """Destroy the default group if it is ours, and let gloo's threads come to rest."""
    global _shared
    shared, _shared = _shared, None
    if shared is None or shared.pid != os.getpid():
        return
    if shared.ours and shared.world is dist.group.WORLD:
        _leave_together(shared)
    process_groups.wait_before_exit()


def _leave_together(shared: _Shared) -> None:
    """Destroy the default group: after all ranks have reached this point, unless this process ends with an error."""
    # Set by the interpreter when it prints an uncaught exception (last_exc is its name from Python 3.12 on).
    if shared.failed or getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None:
        _abandon()
        return
    try:
        if _all_leave(shared.store, dist.get_world_size()):
            dist.barrier(group=shared.cpu)
        else:
            _abandon()
        process_groups.destroy()
    except (RuntimeError, dist.DistError) as error:  # others that waited longer than LEAVE_S are gone
        logger.debug("leaving alone: %s", error)
        _abandon()


def _abandon() -> None:
    """Keep torch's process groups alive forever: their destructors wait (up to the timeout) for work that others will never join."""
    for process_group in torch_private.process_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))


def _all_leave(store: dist.Store, world_size: int) -> bool:
    """Whether all ranks reached this point within ``LEAVE_S``. Through the store: a collective that a rank never joins would block the exit.

    All ranks get one answer, the first that any rank found: one that gives up may keep running, and a later one must not wait for it.
    """
    deadline = time.monotonic() + LEAVE_S
    try:
        left = store.add("left", 1)
        while left < world_size and time.monotonic() < deadline:
            time.sleep(0.005)
            left = store.add("left", 0)
        answer: bytes = store.compare_set("leave", "", "together" if left >= world_size else "alone")
    except (RuntimeError, dist.DistError) as error:
        logger.debug("leaving alone: %s", error)
        return False
    return answer == b"together"
