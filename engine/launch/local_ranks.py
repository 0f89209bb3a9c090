"""The processes that a run needs: those that a launcher started, or those that it starts itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from engine import strategies
from engine.config.settings import Settings
from engine.distributed import failures
from engine.distributed.environment import Environment, detect
from engine.distributed.environments.base import shown
from engine.distributed.group import Group, join
from engine.launch import script_ranks
from engine.utils import accelerator
from engine.utils.log import logger, warn_once


@contextmanager
def crew(settings: Settings, environment: Environment | None = None) -> Iterator[Group]:
    """The group of all processes of this job, met. An error that only says that others are gone is replaced by theirs.

    ``environment``: this process's, if the caller has read it.
    """
    kind = accelerator.device_type(settings.accelerator)
    timeout = timedelta(seconds=settings.start_timeout.value)
    environment = environment or detect(os.environ)
    started: script_ranks.ScriptRanks | None = None
    if environment.world_size == 1 and environment.name == "single":
        strategies.get(settings.strategy, 1)  # an unknown name is said before processes are started
        started = _start(kind, settings)
        environment = started.environment if started else environment
    else:
        _check(environment, settings)
    index = (
        environment.local_rank if not isinstance(settings.devices, tuple) else settings.devices[environment.local_rank]
    )
    device = accelerator.device(kind, index, own=environment.binds_devices)
    if started is None:
        yield join(environment, device, timeout=timeout, debug=settings.debug)
        return
    with started.training():
        yield join(environment, device, timeout=timeout, store=started.store, check=started.check, debug=settings.debug)


def _start(kind: str, settings: Settings) -> script_ranks.ScriptRanks | None:
    devices = settings.devices
    wanted = len(devices) if isinstance(devices, tuple) else accelerator.count(kind, devices)
    if settings.num_nodes > 1:
        raise ValueError(
            f"num_nodes={settings.num_nodes}: several machines need a launcher; on each of them run "
            f"fit launch --nnodes {settings.num_nodes} --nproc {wanted} --rdzv HOST:29500 script.py (or torchrun --nnodes {settings.num_nodes} "
            f"--nproc-per-node {wanted} --rdzv-backend c10d --rdzv-endpoint HOST:29500 script.py), or start it with srun or mpirun"
        )
    if wanted == 1:
        if (started := script_ranks.current()) is not None:
            started.demand(1)
        return None
    if settings.strategy == "single":
        raise ValueError(
            f"strategy='single' and devices={devices!r}: one process cannot use {wanted} devices; use strategy='ddp' or 'auto'"
        )
    if script_ranks.current() is None:
        failures.refuse_imported_script()
        logger.info("this script runs as %d processes (%s): starting %d more", wanted, kind, wanted - 1)
    try:
        return script_ranks.start(wanted, timeout=timedelta(seconds=settings.start_timeout.value))
    except RuntimeError as error:
        if devices != "auto":
            raise
        warn_once(f"one of {wanted} devices is used, because other processes cannot be started from here: {error}")
        return None


def _check(environment: Environment, settings: Settings) -> None:
    devices = len(settings.devices) if isinstance(settings.devices, tuple) else settings.devices
    if devices not in ("auto", -1, environment.local_world_size):
        raise ValueError(
            f"devices={settings.devices!r} was asked for, but {environment.name} has started {environment.local_world_size} process(es) on this "
            f"machine{_read_from(environment)}; leave devices out, or start as many"
        )
    if settings.num_nodes not in (1, environment.num_nodes):
        raise ValueError(
            f"num_nodes={settings.num_nodes} was asked for, but {environment.name} has started {environment.num_nodes} node(s)"
            f"{_read_from(environment)}; leave it out"
        )


def _read_from(environment: Environment) -> str:
    return f" (read: {shown(environment.variables)})" if environment.variables else ""
