"""Copies of tensors in host memory, from which a checkpoint is written while the training continues."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Set
from typing import Any

import numpy
import torch
from torch import Tensor

from engine.utils import accelerator, device_copies

CHUNK = 64 << 20
"""Bytes allocated at once for small tensors. Pinning blocks the driver: between several pieces, the training's calls get their turn."""
ALIGNED = 64
"""Each tensor in such an allocation starts at a multiple of this many bytes."""


class Staging:
    """Host copies of tensors. The buffers are reused by the next save of the same tensors, and pinned where the device supports that.

    Tensors that only an optimizer changes are copied while forward and backward passes run: call :meth:`hold` before the next
    optimizer step. On a device with streams the copies run on a separate stream, without blocking the host. On a device without streams
    :meth:`start` copies everything, because another thread must not use the device while it computes.

    The first save's buffers are allocated on the writing thread. Changes in place are detected by the tensors' version counters, which
    changes through ``tensor.data`` do not increment.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Hashable, Tensor] = {}
        self._stream: Any = device_copies.side_stream(device, "checkpoint") if accelerator.has_streams(device) else None
        self._copies_now = device.type != "cpu" and self._stream is None
        self._event: Any = None
        self._remaining: dict[Hashable, Tensor] = {}
        self._versions: list[int] = []
        self._watched = self._changed = False
        self._lock = threading.Lock()
        self._copied = threading.Event()
        """Set when the tensors may change; on a device with streams, only after the event."""
        self._copied.set()

    def start(self, tensors: Mapping[Any, Tensor], later: Set[Any]) -> None:
        """Start copying ``tensors``. Called on the training thread, once the previous copies are written.

        Args:
            later: the names of tensors that only an optimizer step changes, which may be copied later.
        """
        later = set() if self._copies_now else later
        form = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._buffers = {n: copy for n, copy in self._buffers.items() if form.get(n) == (copy.shape, copy.dtype)}
        at_once = {name: tensor for name, tensor in tensors.items() if name not in later}
        self._remaining = {name: tensor for name, tensor in tensors.items() if name in later}
        self._versions = [tensor._version for tensor in self._remaining.values()]
        self._watched, self._changed, self._event = bool(self._remaining), False, None
        self._allocate(at_once)
        for name, tensor in at_once.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=not self._copies_now)
        if self._stream is not None:
            self._stream.wait_stream(accelerator.current_stream(self.device))
            if all(name in self._buffers for name in self._remaining):
                self._enqueue()
        if any(self._event is None or tensor.device.type == "cpu" for tensor in self._remaining.values()):
            self._copied.clear()

    def complete(self) -> dict[Any, Tensor]:
        """Copy the remaining tensors and return all copies by name. Called on the writing thread.

        Raises:
            RuntimeError: a tensor has changed, so that its copy may mix old and new values.
        """
        try:
            self._copy()
        finally:
            self._copied.set()
        if self._event is not None:
            self._event.synchronize()
        self.verify()
        return dict(self._buffers)

    def verify(self, last: bool = False) -> None:
        """Check that no tensor has changed between :meth:`start` and :meth:`hold`, by the version counters. Called on the writing thread.

        A kernel that runs while its tensor is copied increments the counter only at its end, so check again after the files are written.

        Args:
            last: the files are written: stop watching.

        Raises:
            RuntimeError: a tensor has changed.
        """
        with self._lock:
            self._compare()
            if last:
                self._watched, self._remaining = False, {}
        if self._changed:
            raise RuntimeError(
                "a parameter was changed by something other than an optimizer while it was copied for a checkpoint; save with "
                "asynchronous=False (ModelCheckpoint) or wait=True (save_state), or wait for the copies before you change it: run.saver.hold(), "
                "in a loop of your own engine.checkpoint_writer.hold()"
            )

    def hold(self) -> None:
        """Wait until the tensors may change, because they are copied. Called on the training thread."""
        self._copied.wait()
        if self._event is not None:
            accelerator.current_stream(self.device).wait_event(self._event)
        with self._lock:
            self._compare()
            self._watched = False

    def close(self) -> None:
        """Free the buffers, which nothing may be reading. Pinned memory must be freed explicitly: torch would keep it in a cache."""
        pinned = any(buffer.is_pinned() for buffer in self._buffers.values())
        self._buffers, self._remaining = {}, {}
        if pinned:
            device_copies.empty_host_cache(self.device)

    def _compare(self) -> None:
        """Note whether a watched tensor's version counter has changed."""
        if self._watched and [tensor._version for tensor in self._remaining.values()] != self._versions:
            self._changed = True

    def _copy(self) -> None:
        """Copy the tensors that :meth:`start` has left for later."""
        self._allocate(self._remaining)
        if self._stream is not None and self._event is None:
            self._enqueue()
        for name, tensor in self._remaining.items():
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                # NumPy, since torch's copy uses a thread pool, which fails in a thread of a forked process.
                numpy.copyto(_bytes(self._buffers[name]), _bytes(tensor))
            elif tensor.device.type == "cpu":
                self._buffers[name].copy_(tensor.detach())

    def _enqueue(self) -> None:
        """Queue the remaining copies on the separate stream."""
        with torch.no_grad(), self._stream:
            for name, tensor in self._remaining.items():
                if tensor.device.type != "cpu":
                    self._buffers[name].copy_(tensor, non_blocking=True)
            self._event = self._stream.record_event()

    def _allocate(self, tensors: Mapping[Hashable, Tensor]) -> None:
        """Allocate buffers for the ``tensors`` that have none."""
        missing = {name: tensor for name, tensor in tensors.items() if name not in self._buffers}
        pin = accelerator.pins(self.device)
        for names in chunks({name: -(-tensor.nbytes // ALIGNED) * ALIGNED for name, tensor in missing.items()}):
            sizes = [-(-missing[name].nbytes // ALIGNED) * ALIGNED for name in names]
            chunk = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
            for name, piece in zip(names, chunk.split(sizes), strict=True):
                tensor = missing[name]
                self._buffers[name] = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def chunks(sizes: Mapping[Any, int]) -> list[list[Any]]:
    """Group names by their ``sizes`` (bytes), with at most ``CHUNK`` bytes per group; a larger tensor gets a group of the next power of two.

    Torch rounds pinned allocations up to powers of two, so small tensors use the space that a large one leaves. First fit, largest first.
    """
    groups: list[list[Any]] = []
    room: list[int] = []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        index = next((i for i, free in enumerate(room) if free >= size), len(groups))
        if index == len(groups):
            groups.append([])
            room.append(max(CHUNK, 1 << (size - 1).bit_length() if size else 0))
        groups[index].append(name)
        room[index] -= size
    return groups


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
