"""Copy batches to the device while the previous batch is computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.data.feed import MicroBatch
from engine.data.packed_rows import note_restarts
from engine.utils import accelerator, device_copies
from engine.utils.tree import map_tensors, move


class SideStream:
    """A separate device stream for copies of batches.

    A copy waits for computations that were queued before it. This makes it safe to reuse the memory of a freed batch for the copy
    without ``record_stream``, which would not see the tensors inside custom batch classes. As the copy starts before the
    previous batch is computed, the two still overlap.

    Args:
        dtype: the dtype of floating point tensors on the device; ``None``: unchanged.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        self.stream = device_copies.side_stream(device, "batches")
        self.pins = accelerator.pins(device)

    def copy(self, batch: Any) -> Any:
        """Start copying; the result may be used after :meth:`join`."""
        self.stream.wait_stream(accelerator.current_stream(self.device))
        with self.stream:
            moved = move(pinned(batch) if self.pins else batch, self.device, self.dtype)
        note_restarts(batch, moved)
        return moved

    def join(self) -> None:
        """Make computations that are queued later wait for the copies started so far."""
        accelerator.current_stream(self.device).wait_stream(self.stream)


def pinned(batch: Any) -> Any:
    """Copy the CPU tensors of ``batch`` to pinned memory, since a copy to the device from other memory blocks the host.

    Objects with a method ``pin_memory()`` are pinned by it, as in a ``DataLoader(pin_memory=True)``. Sparse and nested tensors and subclasses
    of ``Tensor`` are left as they are: some cannot be pinned, others would come back as plain tensors.
    """

    def pin(tensor: Tensor) -> Tensor:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
        return tensor.pin_memory() if plain and tensor.device.type == "cpu" and not tensor.is_pinned() else tensor

    def pin_itself(item: Any) -> Any:
        if not callable(getattr(item, "pin_memory", None)) or isinstance(item, type):
            return NotImplemented
        try:
            result = (copy.copy(item) if hasattr(item, "__copy__") else item).pin_memory()
        except RuntimeError:  # a tensor inside cannot be pinned, or is on the device: the item can be copied unpinned
            return item
        return item if result is None else result

    return map_tensors(pin, batch, pin_itself)


def ahead(batches: Iterator[MicroBatch], side: SideStream, across: bool) -> Iterator[MicroBatch]:
    """Yield the micro-batches on the device; while one is computed, the next one is copied.

    So at most two batches are on the device, or three if the caller keeps the previous one while it requests the next, as ``for batch in loader``
    does without a ``del batch`` at the end of its body.

    Args:
        across: whether to read the next window's first micro-batch during a window's last one.
    """
    waiting: MicroBatch | None = None
    for batch, share in batches:
        copied = side.copy(batch), share
        if waiting is not None:
            yield waiting
        side.join()
        waiting = copied
        del batch, copied
        if share.last and not across:
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting
