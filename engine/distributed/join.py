"""Joining the other processes of a job.

A launcher's store outlives its ranks, and nothing in their environment distinguishes attempts: each machine's agent counts only its own restarts,
and machines come and go without one. So each rank draws a ticket, and rank 0 answers every ticket with the name of its own round.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.distributed import failures, process_groups, stores
from engine.distributed.environments import Environment, detect
from engine.distributed.group import Group
from engine.distributed.own_process import JoinedGroups, own_process
from engine.utils import accelerator as accelerators

_TICKETS, _DONE = "fit/tickets", "fit/done"
_stores: dict[tuple[str, int], dist.Store] = {}  # rank 0's port stays bound until the process ends


def join(
    environment: Environment,
    device: torch.device,
    *,
    timeout: timedelta,
    store: dist.Store | None = None,
    check: Callable[[], None] | None = None,
    debug: bool = False,
) -> Group:
    """Join the processes of the job; every process calls this.

    World size 1 creates no process group. Otherwise torch's default group is initialised (gloo for CPU tensors, the device's own back end
    for others, such as NCCL), or reused if the user or an earlier ``join`` has initialised it. Ours is destroyed at the interpreter's exit.

    Args:
        environment: this process's rank, world size and addresses.
        device: this process's device; ``torch.device("cuda", i)`` must be the current CUDA device already.
        timeout: for joining, and later for each collective.
        store: the store for the rendezvous; by default one is served at the environment's master address and port.
        check: called on rank 0 about ten times a second while it waits for others; it may raise.
        debug: whether each collective first compares operation, shapes and dtypes over the ranks, and raises where they differ
            (torch's ``DebugLevel.DETAIL``); for all groups of this process, at the cost of a small collective for each.

    Raises:
        ValueError: ``debug`` with a default group that was created without it.
        RuntimeError: the others did not join in time, the address cannot be served or reached, the default group that exists has
            another rank or size than the environment says, or the process may not open as many connections as the job needs.
    """
    failures.attach(environment)
    if dist.is_initialized():
        _check_existing(environment)
        joined = own_process.joined
        connected = environment.world_size > 1 or (joined is not None and joined.world is dist.group.WORLD)
        return Group(environment, device, _existing(timeout, debug) if connected else None)
    if environment.world_size == 1:
        if environment.name == "single":
            own_process.ran_alone = True
        return Group(environment, device)
    failures.refuse_imported_script()
    process_groups.allow_descriptors(environment.world_size)
    where = f"{environment.master_addr}:{environment.master_port}"
    store = meet(
        store or _open_store(environment, timeout, where),
        environment.rank,
        environment.world_size,
        where,
        timeout=timeout,
        check=check,
    )
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # also for groups that are created later
    process_groups.initialise(
        device,
        store,
        environment.rank,
        environment.world_size,
        timeout,
        dist.get_debug_level() == dist.DebugLevel.DETAIL,
        hook=failures.hook(environment),
    )
    return Group(environment, device, _adopt(timeout, store, debug or dist.get_debug_level() == dist.DebugLevel.DETAIL))


def join_here(environment: Environment, accelerator: str, *, timeout: timedelta, debug: bool) -> Group:
    """:func:`join` on this process's own device, with the processes that an earlier ``Fit`` has started, if there was one.

    Raises:
        ValueError, RuntimeError: the accelerator is unknown or missing; and the errors of :func:`join`.
    """
    kind, started = accelerators.device_type(accelerator), own_process.started
    device = accelerators.device(kind, environment.local_rank, binds_devices=environment.binds_devices)
    return join(environment, device, timeout=timeout, store=started.store if started else None, debug=debug)


def join_alone(device: torch.device, *, timeout: timedelta) -> Group:
    """Start a job of one process that does run its collectives, in the device's back end: for checks of a machine with one device.

    Later runs of this process join it: DDP reduces, FSDP shards, and checkpoints are agreed on, over one rank.
    """
    store = dist.HashStore()
    process_groups.initialise(device, store, 0, 1, timeout, debug=False)
    return Group(Environment("single"), device, _adopt(timeout, store, debug=False))


def own_environment(environment: Environment | None = None) -> Environment:
    """This process's rank and job: as given, as an earlier ``Fit`` of this process has set it up, or as the launcher's variables say.

    An error that ends this process afterwards is recorded for the launcher.
    """
    started = own_process.started
    environment = environment or (started.environment if started else detect(os.environ))
    failures.attach(environment)
    return environment


def _check_existing(environment: Environment) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (environment.rank, environment.world_size):
        raise RuntimeError(
            f"torch.distributed is initialised already as rank {rank} of {world_size}, but the environment ({environment.name}) says rank "
            f"{environment.rank} of {environment.world_size}. Start the processes with torchrun, or set its variables (RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) in each of them before init_process_group."
        )


def _existing(timeout: timedelta, debug: bool) -> JoinedGroups:
    """State shared by all groups of this process, on torch's existing default group."""
    joined = own_process.joined
    if joined is None or joined.world is not dist.group.WORLD:
        joined = _adopt(timeout, None, dist.get_debug_level() == dist.DebugLevel.DETAIL)
    if debug and not joined.debug:
        raise ValueError(
            "debug=True was requested, but this process's collectives were set up without it: give it to the first Fit or Engine of the "
            "process, or set TORCH_DISTRIBUTED_DEBUG=DETAIL before init_process_group"
        )
    joined.failed = False  # an earlier run's error was handled, or this run would not start
    return joined


def _adopt(timeout: timedelta, store: dist.Store | None, debug: bool) -> JoinedGroups:
    """Note the default group as this process's, with a gloo group beside it, and leave it at the interpreter's exit.

    Args:
        store: of our rendezvous; ``None``: the user initialised the group.
    """
    world = dist.group.WORLD
    assert world is not None
    cpu = process_groups.on_cpu(timeout=timeout)
    assert cpu is not None
    # Handlers run last in, first out: ours must run before those that serve the store or wait for our exit.
    atexit.unregister(own_process.leave)
    atexit.register(own_process.leave)
    own_process.joined = JoinedGroups(
        world, cpu, store or world.get_group_store(), store is not None, os.getpid(), debug
    )
    return own_process.joined


def _open_store(environment: Environment, timeout: timedelta, where: str) -> dist.Store:
    """The store at the job's address, which rank 0 serves unless the launcher does; one for all jobs of this process at that address."""
    who = f"rank {environment.rank} of {environment.world_size}"
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


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    where: str,
    *,
    timeout: timedelta,
    check: Callable[[], None] | None = None,
) -> dist.Store:
    """Create the part of ``store`` for the ranks of this round only; every rank calls this. Rank 0 returns when all have joined.

    Args:
        where: the store's address, for messages.
        check: called on rank 0 about ten times a second while it waits for others; it may raise (``ScriptRanks.check``).

    Raises:
        RuntimeError: the others, or rank 0, did not join in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    ticket = store.add(_TICKETS, 1)
    if rank != 0:
        name = _await_answer(
            store, ticket, deadline, f"rank 0 did not connect to {where} within {timeout.total_seconds():g} s"
        )
        part = _part(store, name, timeout)
        part.add("joined", 1)
        return part
    mine = _part(store, str(ticket), timeout)
    joined, pause, answered = mine.add("joined", 0) + 1, 0.005, store.add(_DONE, 0)
    while joined < world_size:
        drawn = store.add(_TICKETS, 0)
        for number in range(answered + 1, drawn + 1):
            store.set(f"fit/answers/{number}", str(ticket))
        answered = drawn
        joined = mine.add("joined", 0) + 1
        if joined >= world_size:
            break
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {joined} of {world_size} ranks connected to {where} within {timeout.total_seconds():g} s. Look for the "
                "first error in the output of the others, and check whether their machines can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    store.add(_DONE, answered - store.add(_DONE, 0))  # the next rank 0 need not answer these
    return mine


def _await_answer(store: dist.Store, ticket: int, deadline: float, problem: str) -> str:
    key, pause = f"fit/answers/{ticket}", 0.005
    # Polled: a signal would not interrupt a blocking wait.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{problem}. Look for the first error in its output, and check whether its machine can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
    return store.get(key).decode()


def _part(store: dist.Store, name: str, timeout: timedelta) -> dist.Store:
    part = dist.PrefixStore(f"fit/{name}", store)
    part.set_timeout(timeout)
    return part
