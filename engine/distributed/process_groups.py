"""Create torch's process groups: as few as possible, each with one back end. Each gloo group costs a rank a connection to every other rank."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.utils import accelerator, torch_private

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

GLOO_GROUPS = 5
"""The number of gloo groups over all ranks that a job may have: the default group, flags and objects, checkpoints, data, and one more."""
OTHER_DESCRIPTORS = 512
"""The number of file descriptors for everything else: data, workers, the device's library."""
ROOM = 65536
"""The soft limit of descriptors is raised to this, or to what the job needs, but no higher: some programs loop over every possible descriptor."""

QUIET_S = 0.1
"""The maximum time (s) that a fork waits for gloo's threads."""
LAST_QUIET_S = 2.0
"""The maximum time (s) that the exit of a process waits for gloo's threads."""
FORKS_MAY_HANG = sys.version_info < (3, 11, 10) and os.path.isdir("/proc/self/task")
"""Whether this Python's forked children may hang beside gloo's threads; see :func:`_wait_before_forks`."""

_forks_wait = False  # whether forks of this process wait for gloo's threads

_connected: dist.ProcessGroup | None = None
"""The default group, if it was connected to this process's device when we initialised it."""

_hooks: tuple[Any, Any] = (None, None)
"""``sys.excepthook`` before and after we initialised the default group."""

Parts = Sequence[Sequence[int]]
"""Lists of ranks; a rank is in at most one of them."""


def initialise(
    device: torch.device,
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    debug: bool,
    hook: Any = None,
) -> None:
    """Initialise torch's default group: gloo for CPU tensors, and the device's own back end for its tensors.

    If the back end's connections can be split (NCCL), the device is connected here, so that :func:`on_device` can split the connections.
    In debug mode torch wraps the back ends, which are connected at their first use.

    Args:
        hook: the ``sys.excepthook`` as long as the group exists; ``None``: the current one stays.

    Raises:
        RuntimeError: torch knows no back end for this device.
    """
    global _connected, _hooks
    before = sys.excepthook
    backend = "gloo" if device.type == "cpu" else accelerator.collectives_backend(device)
    several = backend != "gloo"
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{backend}" if several else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if several and not debug else None,
    )
    # Torch's hook puts the rank in front of each line of an error, even with a single rank.
    sys.excepthook = before if hook is None else hook
    _hooks = (before, sys.excepthook)
    world = _world()
    _connected = world if world.bound_device_id is not None else None
    # Bound only during a split: while the group is bound, torch makes ranks outside of a new gloo group wait for those inside.
    world.bound_device_id = None


def initialise_alone(device: torch.device) -> None:
    """Initialise a default group of this process alone, for a library that needs one. It has no address, so nothing can connect to it."""
    hook = sys.excepthook
    device_backend = "" if device.type == "cpu" else f",{device.type}:{accelerator.collectives_backend(device)}"
    dist.init_process_group(f"cpu:gloo{device_backend}", store=dist.HashStore(), rank=0, world_size=1)
    sys.excepthook = hook  # as in `initialise`
    _wait_before_forks()


def destroy() -> None:
    """Destroy the default group that :func:`initialise` created, and restore ``sys.excepthook``."""
    dist.destroy_process_group()
    before, installed = _hooks
    if installed is sys.excepthook:
        sys.excepthook = before


def backend_of(device: torch.device) -> str:
    """The name of the default group's back end for tensors on this device."""
    pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
    return next((name for kind, name in pairs if kind == device.type), str(dist.get_backend()))


def on_cpu(parts: Parts | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Create gloo groups of ``parts`` (by default one of all ranks) for flags, objects and CPU tensors, and return this rank's. A collective."""
    _wait_before_forks()
    with _bound(None):
        return _member_of_new(parts or [list(range(dist.get_world_size()))], "gloo", timeout)


def on_device(parts: Parts, device: torch.device) -> dist.ProcessGroup | None:
    """Create a group for each part, only for the device's tensors, and return this rank's; ``None`` for a rank in no part. A collective."""
    backend = backend_of(device)
    if _can_split(device):
        with _bound(device):
            return torch_private.member(
                dist.split_group(split_ranks=[list(part) for part in parts], backend=f"{device.type}:{backend}")
            )
    with _bound(None):
        return _member_of_new(parts, backend, None)


def _member_of_new(parts: Parts, backend: str, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Create a process group for each part, and return the one with this rank, or ``None``."""
    rank, member = dist.get_rank(), None
    for ranks in parts:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        member = group if rank in ranks else member
    return member


def _can_split(device: torch.device) -> bool:
    """Whether the default group's connections between devices can be split, which creates the groups of all parts in one call, without connecting."""
    world = _world()
    if world is not _connected and world.bound_device_id is None:
        return False
    # Without the argument torch would split gloo's connections as well.
    return "backend" in inspect.signature(dist.split_group).parameters and torch_private.can_split(world, device)


@contextlib.contextmanager
def _bound(device: torch.device | None) -> Iterator[None]:
    """Bind the default group to ``device`` inside the block."""
    world = _world()
    before, world.bound_device_id = world.bound_device_id, device
    try:
        yield
    finally:
        world.bound_device_id = before


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _wait_before_forks() -> None:
    """Make each later fork of this process wait until gloo's threads sleep, on Python versions where the child could hang otherwise.

    In CPython before 3.11.10 a forked child waits forever for the lock of thread states if another thread of the parent held it at that
    moment (python/cpython#112275). gloo's threads take the lock after each collective, to release its tensors, and a run has collectives just
    before it forks data workers: one short training in 60 hung. Called when a gloo group is created; repeated calls do nothing.
    """
    global _forks_wait
    if FORKS_MAY_HANG and not _forks_wait:
        _forks_wait = True
        os.register_at_fork(before=_wait_for_gloo)


def wait_before_exit() -> None:
    """Wait until gloo's threads sleep: a thread that releases a tensor while the interpreter shuts down aborts the process.

    A thread holds the tensors of a collective for a moment after the collective is complete, longer on a loaded machine.
    """
    if os.path.isdir("/proc/self/task"):
        _wait_for_gloo(LAST_QUIET_S)
        time.sleep(0.0002)  # releases the GIL: a thread that seemed to sleep may have waited for it
        _wait_for_gloo(LAST_QUIET_S)


def _wait_for_gloo(seconds: float = QUIET_S) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # no file descriptor is left: continue without checking
        while _gloo_works(deadline):
            time.sleep(0.0002)


def _gloo_works(deadline: float) -> bool:
    """Whether a thread of gloo is awake; False if none was found awake until ``deadline``."""
    for task in os.listdir("/proc/self/task"):
        if time.monotonic() > deadline:
            break
        try:
            with open(f"/proc/self/task/{task}/stat", "rb") as file:
                text = file.read()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        # "17 (pt_gloo_runloop) S 1 ...": a thread's name may contain anything, even brackets.
        name, _, state = text.partition(b"(")[2].rpartition(b")")
        if name.startswith(b"pt_gloo") and not state.startswith(b" S"):
            return True
    return False


def allow_descriptors(world_size: int) -> None:
    """Raise this process's soft limit of open files to what a job of ``world_size`` ranks needs.

    Raises:
        RuntimeError: the hard limit is too low.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = GLOO_GROUPS * world_size + OTHER_DESCRIPTORS
    if os.path.isdir("/proc/self/fd"):
        needed += len(os.listdir("/proc/self/fd"))
    unlimited = resource.RLIM_INFINITY
    ceiling = hard if hard != unlimited else max(needed, ROOM)
    if soft != unlimited and soft < (raised := min(ceiling, max(needed, ROOM))):
        with contextlib.suppress(ValueError, OSError):  # the system's own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft != unlimited and soft < needed:
        raise RuntimeError(
            f"a rank of a job with {world_size} processes needs about {needed} open files and connections, but this process may have only {soft}: "
            "raise the hard limit where it starts (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker, PropagateResourceLimits of SLURM)"
        )
