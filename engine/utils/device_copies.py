"""Copies beside the training: a second stream of the device, a thread that is on the device, and pinned memory that goes back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.utils import accelerator

Result = TypeVar("Result")


@functools.cache
def side_stream(device: torch.device, use: str) -> torch.Stream:
    """A stream beside the one that computes; one for each use in a process.

    Torch never destroys a stream, and keeps freed memory for the stream that it was allocated on: new streams would reserve more each time.
    """
    return torch.Stream(device)


def call_on_device(device: torch.device, work: Callable[[], Result]) -> Result:
    """Call ``work`` with ``device`` as the current one, in a new thread: a thread starts on device 0, and would open a context there."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return work()


def empty_host_cache(device: torch.device) -> None:
    """Return freed pinned memory to the system, where torch keeps it."""
    # Devices without torch's allocator of pinned memory crash in this call; the module of one that has it tells its statistics.
    if hasattr(accelerator.module(device), "host_memory_stats") and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
