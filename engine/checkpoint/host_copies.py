"""Copies of tensors in host memory, so that the training continues while they are written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from typing import Any

import numpy
import torch
from torch import Tensor

from engine.utils import accelerator


class Staging:
    """Buffers that are reused for the next copy of a tensor of the same name; pinned where the device has pinned memory.

    Tensors that only an optimizer changes are copied while forward and backward passes run: call :meth:`hold` before the next
    optimizer step. On a device with streams the host does not wait: the copies run on a separate one. A device without them
    copies everything in :meth:`begin`, because another thread must not read it while it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._stream: Any = accelerator.side_stream(device, "checkpoint") if accelerator.has_streams(device) else None
        self._at_once = device.type != "cpu" and self._stream is None
        self._event: Any = None
        self._left: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, Tensor], later: Set[str]) -> dict[str, Tensor]:
        """The buffers of ``tensors``, filled by :meth:`finish`. Called on the training thread, when the last copy is no longer read.

        Args:
            later: names of tensors that only an optimizer step changes.
        """
        later = set() if self._at_once else later
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        self._buffers = dict(copies)
        for name, tensor in tensors.items():
            if name not in later:
                copies[name].copy_(tensor, non_blocking=not self._at_once)
        self._left = [(copies[name], tensor) for name, tensor in tensors.items() if name in later]
        self._versions = [tensor._version for _, tensor in self._left]
        if self._stream is not None:
            self._stream.wait_stream(accelerator.current_stream(self.device))
            with self._stream:
                self._copy()
                self._event = self._stream.record_event()
        elif self._left:
            self._done.clear()
        return copies

    def finish(self) -> None:
        """Copy the rest. Called on the writing thread."""
        if self._event is not None:
            self._event.synchronize()
            self._left = []
            return
        try:
            self._copy()
        finally:
            self._left = []
            self._done.set()

    def hold(self) -> None:
        """Wait until the tensors may change."""
        if self._event is not None:
            accelerator.current_stream(self.device).wait_event(self._event)
        else:
            self._done.wait()

    def _copy(self) -> None:
        with torch.no_grad():
            for (copy, tensor), version in zip(self._left, self._versions, strict=True):
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    # Not torch's copy: its thread pool fails in a thread of a forked process.
                    numpy.copyto(_bytes(copy), _bytes(tensor))
                else:
                    copy.copy_(tensor, non_blocking=True)
                if tensor._version != version:
                    raise RuntimeError(
                        "a parameter was changed by something other than an optimizer while it was copied for a checkpoint; save with "
                        "asynchronous=False (ModelCheckpoint) or wait=True (save_state), or change it in on_train_batch_end"
                    )

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=accelerator.pins(tensor.device))


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
