"""An out-of-memory error's note: the command that finds which settings fit. Nothing is planned here, where other ranks may wait in a collective."""

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
"""Texts in the messages of torch's allocator for the host, whose errors are plain ``RuntimeError`` objects."""


@contextmanager
def noting_what_finds_a_fit(enabled: bool) -> Iterator[None]:
    """Add the note to an out-of-memory error that leaves the block, if ``enabled``. It stays the same error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if enabled and (text := note(error)) is not None:
            error.add_note(text)
        raise


def note(error: BaseException) -> str | None:
    """The command that plans what fits; ``None``: the error is another one, the device's size is not known, or planning is not installed."""
    device = full_device(error)
    if device is None or find_spec("engine.planning") is None:
        return None
    options, memory = device
    return (
        "To see which settings fit, run in a process of its own: "
        f"fit plan TARGET --search --world-size {_ranks()[0]}{options} --memory-limit {memory / 2**30:.2f}GiB"
    )


def full_device(error: BaseException) -> tuple[str, int] | None:
    """The options of ``fit plan`` for the kind of device whose memory is full, and its size in bytes; ``None``: the error does not tell."""
    if isinstance(error, torch.OutOfMemoryError):
        memory = device_memory(str(error))
        return None if memory is None else ("", memory)
    if isinstance(error, MemoryError) or any(text in str(error) for text in _HOST):
        return " --device cpu", _host_memory()
    return None


def device_memory(message: str = "") -> int | None:
    """Bytes of the device that an out-of-memory error's message names, else of the current accelerator; ``None``: there is none."""
    named = re.search(r"total capacity of ([\d.]+) ?([KMGT]iB)", message)
    if named is not None:
        return size_in_bytes(f"{named[1]}{named[2]}")
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None


def _ranks() -> tuple[int, int]:
    """Ranks of the job, and of this machine. Processes that a ``Fit`` has started are on one, and their variables do not name them."""
    environment = detect(os.environ)
    if environment.world_size == 1 and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_world_size()
    return environment.world_size, environment.local_world_size


def _host_memory() -> int:
    """Bytes that a rank may have: its share of the host's, or the process's limit (``ulimit -v``)."""
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _ranks()[1]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return share if limit == resource.RLIM_INFINITY else min(share, limit)
