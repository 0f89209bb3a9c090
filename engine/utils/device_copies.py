"""Helpers for copying while training runs: a second stream, the device of a thread, and the return of pinned memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.utils import accelerator

Result = TypeVar("Result")


@functools.cache
def side_stream(device: torch.device, use: str) -> torch.Stream:
    """A stream beside the one that computes; a process has one for each ``use``.

    Torch never destroys a stream, and reuses freed memory only on the stream that allocated it, so each new stream would reserve more memory.
    """
    return torch.Stream(device)


def call_on_device(device: torch.device, work: Callable[[], Result]) -> Result:
    """Return ``work()``, called with ``device`` as the current one. For use in a new thread, which would otherwise open a context on device 0."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return work()


def empty_host_cache(device: torch.device) -> None:
    """Return freed pinned memory to the system, where torch keeps it."""
    # Devices without torch's allocator of pinned memory crash in this call; modules of devices that have it report its statistics.
    if hasattr(accelerator.module(device), "host_memory_stats") and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
