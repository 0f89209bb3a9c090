"""The note on an out-of-memory error: the command that finds settings that fit. It plans nothing itself: other ranks may wait in a collective."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import torch

from engine.config.file_size import size_in_bytes
from engine.distributed.environments import detect

_HOST = ("can't allocate memory", "not enough memory")
"""Texts that identify out-of-memory errors of torch's host allocator, which are plain ``RuntimeError`` objects."""


@contextmanager
def noting_what_finds_a_fit(enabled: bool) -> Iterator[None]:
    """Add :func:`note` to an out-of-memory error that leaves the block, if ``enabled``; the error propagates otherwise unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if enabled and (text := note(error)) is not None:
            error.add_note(text)
        raise


def note(error: BaseException) -> str | None:
    """Name the command that finds settings that fit. ``None``: it is another error, the device's size is unknown, or planning is not installed."""
    device = full_device(error)
    if device is None or find_spec("engine.planning") is None:
        return None
    options, memory = device
    return (
        "To see which settings fit, run in a new process: "
        f"fit plan TARGET --search --world-size {_ranks()[0]}{options} --memory-limit {memory / 2**30:.2f}GiB"
    )


def full_device(error: BaseException) -> tuple[str, int] | None:
    """The options of ``fit plan`` for the device whose memory is full, and its memory in bytes; ``None``: another error, or the size is unknown."""
    if isinstance(error, torch.OutOfMemoryError):
        memory = device_memory(str(error))
        return None if memory is None else ("", memory)
    if isinstance(error, MemoryError) or any(text in str(error) for text in _HOST):
        return " --device cpu", _host_memory()
    return None


def device_memory(message: str = "") -> int | None:
    """The memory in bytes of the device, as an out-of-memory error's message says, else of the current accelerator; ``None``: there is none."""
    named = re.search(r"total capacity of ([\d.]+) ?([KMGT]iB)", message)
    if named is not None:
        return size_in_bytes(f"{named[1]}{named[2]}")
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None


def _ranks() -> tuple[int, int]:
    """The number of ranks in the job, and on this machine. Processes started by a ``Fit`` are not described by variables, but all on one machine."""
    environment = detect(os.environ)
    if environment.world_size == 1 and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_world_size()
    return environment.world_size, environment.local_world_size


def _host_memory() -> int:
    """The bytes of host memory that a rank may use: its share of the machine's, or the process's limit (``ulimit -v``) if lower."""
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _ranks()[1]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return share if limit == resource.RLIM_INFINITY else min(share, limit)
