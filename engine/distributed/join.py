"""Join the other processes of a job.

A launcher's store outlives its ranks, and nothing in their environment distinguishes one attempt from the next: each machine's agent counts only
its own restarts, and machines come and go without a restart. So each rank draws a ticket from the store, and rank 0 answers every ticket with the
name of its own round (its ticket), under which the ranks of this attempt then meet.
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
"""The store's counters of tickets that were drawn, and of those that a rank 0 has answered."""
# By address; kept, since rank 0's port stays bound until the process ends.
_stores: dict[tuple[str, int], dist.Store] = {}


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

    With world size 1 no process group is created. Otherwise torch's default group is initialised (gloo for CPU tensors, the device's own back end,
    such as NCCL, for others; :func:`engine.distributed.process_groups.initialise` calls ``init_process_group``), or reused if the user or an
    earlier ``join`` has initialised it. A group of ours is destroyed at the interpreter's exit.

    Args:
        environment: this process's rank, world size and addresses.
        device: this process's device; ``torch.device("cuda", i)`` must be the current CUDA device already.
        timeout: the timeout for joining, and later for each collective.
        store: the store for the rendezvous; by default the one at the environment's master address and port.
        check: called on rank 0 about ten times a second while it waits for other ranks; it may raise.
        debug: whether each collective first compares operation, shapes and dtypes over the ranks, and raises an error where they differ
            (torch's ``DebugLevel.DETAIL``). It applies to all groups of this process, at the cost of a small collective for each collective.

    Raises:
        ValueError: ``debug`` with a default group that was created without it.
        RuntimeError: other ranks did not join in time, the address cannot be served or reached, an existing default group has
            another rank or size than the environment says, or the process may not open as many connections as the job needs.
    """
    failures.attach(environment)
    if dist.is_initialized():
        _check_existing(environment)
        joined = own_process.joined
        connected = environment.world_size > 1 or (joined is not None and joined.world is dist.group.WORLD)
        return Group(environment, device, _reuse_default_group(timeout, debug) if connected else None)
    if environment.world_size == 1:
        if environment.name == "single":
            own_process.ran_alone = True
        return Group(environment, device)
    failures.refuse_imported_script()
    process_groups.allow_descriptors(environment.world_size)
    address = f"{environment.master_addr}:{environment.master_port}"
    store = meet(
        store or _open_store(environment, timeout, address),
        environment.rank,
        environment.world_size,
        address,
        timeout=timeout,
        check=check,
    )
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # for groups that are created later, too
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
    """Call :func:`join` for this process's own device, with the ranks that an earlier ``Fit`` of this process has started, if there are any.

    Raises:
        ValueError, RuntimeError: the accelerator is unknown or missing; and the errors of :func:`join`.
    """
    kind, started = accelerators.device_type(accelerator), own_process.started
    device = accelerators.device(kind, environment.local_rank, binds_devices=environment.binds_devices)
    return join(environment, device, timeout=timeout, store=started.store if started else None, debug=debug)


def join_alone(device: torch.device, *, timeout: timedelta) -> Group:
    """Start a job of one process that really runs its collectives in the device's back end, for checks of a machine with one device.

    Later runs of this process use it: DDP, FSDP and checkpoints run their collectives over one rank.
    """
    store = dist.HashStore()
    process_groups.initialise(device, store, 0, 1, timeout, debug=False)
    return Group(Environment("single"), device, _adopt(timeout, store, debug=False))


def own_environment(environment: Environment | None = None) -> Environment:
    """This process's rank and job: ``environment``, else what an earlier ``Fit`` of this process has set up, else what the launcher's variables say.

    From now on an error that ends this process is recorded for the launcher.
    """
    started = own_process.started
    environment = environment or (started.environment if started else detect(os.environ))
    failures.attach(environment)
    return environment


def _check_existing(environment: Environment) -> None:
    """Check that the existing default group has the environment's rank and world size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (environment.rank, environment.world_size):
        raise RuntimeError(
            f"torch.distributed is initialised already as rank {rank} of {world_size}, but the environment ({environment.name}) says rank "
            f"{environment.rank} of {environment.world_size}. Start the processes with torchrun, or set its variables (RANK, WORLD_SIZE, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) in each of them before init_process_group."
        )


def _reuse_default_group(timeout: timedelta, debug: bool) -> JoinedGroups:
    """Reuse torch's existing default group: the state that all groups of this process share."""
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
    """Register the default group as this process's, with a separate gloo group, and arrange to leave it at the interpreter's exit.

    Args:
        store: the store of our rendezvous; ``None``: the user has initialised the group.
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


def _open_store(environment: Environment, timeout: timedelta, address: str) -> dist.Store:
    """The store at the job's address, which rank 0 serves unless the launcher does. All jobs of this process at one address share one store."""
    this_rank = f"rank {environment.rank} of {environment.world_size}"
    if environment.master_addr is None or environment.master_port is None:
        raise RuntimeError(
            f"{this_rank} does not know the address of the others: {environment!r} has no master_addr or no master_port"
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
            advice = (
                "Another program may hold the port: choose another MASTER_PORT."
                if serves
                else "Is rank 0 running there, and is the address right as seen from this machine?"
            )
            raise RuntimeError(
                f"{this_rank} could not {'serve' if serves else 'reach'} the job's store at {address}: {error}. {advice}"
            ) from error
    return _stores[key]


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    address: str,
    *,
    timeout: timedelta,
    check: Callable[[], None] | None = None,
) -> dist.Store:
    """Meet the other ranks of this start of the job, and return the part of ``store`` that only these ranks use. Rank 0 waits until all have joined.

    Args:
        address: the store's address, for messages.
        check: called on rank 0 about ten times a second while it waits for other ranks; it may raise to end the wait, as ``ScriptRanks.check`` does.

    Raises:
        RuntimeError: rank 0 or another rank did not join in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    ticket = store.add(_TICKETS, 1)
    if rank != 0:
        name = _await_answer(
            store, ticket, deadline, f"rank 0 did not connect to {address} within {timeout.total_seconds():g} s"
        )
        rank_0_round = _round_store(store, name, timeout)
        rank_0_round.add("joined", 1)
        return rank_0_round
    own_round = _round_store(store, str(ticket), timeout)
    joined, pause, answered_count = own_round.add("joined", 0) + 1, 0.005, store.add(_DONE, 0)
    while joined < world_size:
        ticket_count = store.add(_TICKETS, 0)
        for number in range(answered_count + 1, ticket_count + 1):
            store.set(f"fit/answers/{number}", str(ticket))
        answered_count = ticket_count
        joined = own_round.add("joined", 0) + 1
        if joined >= world_size:
            break
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {joined} of {world_size} ranks connected to {address} within {timeout.total_seconds():g} s. Look for the "
                "first error in the output of the others, and check whether their machines can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    # The next attempt's rank 0 must not answer these tickets again.
    store.add(_DONE, answered_count - store.add(_DONE, 0))
    return own_round


def _await_answer(store: dist.Store, ticket: int, deadline: float, problem: str) -> str:
    """Wait for rank 0's answer to this rank's ticket: the name of the round. ``problem``: the start of the error after ``deadline``."""
    key, pause = f"fit/answers/{ticket}", 0.005
    # Polled, since a signal would not interrupt a blocking wait.
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{problem}. Look for the first error in its output, and check whether its machine can reach this address."
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.2)
    return store.get(key).decode()


def _round_store(store: dist.Store, name: str, timeout: timedelta) -> dist.Store:
    """The part of ``store`` for the round called ``name``."""
    part = dist.PrefixStore(f"fit/{name}", store)
    part.set_timeout(timeout)
    return part
