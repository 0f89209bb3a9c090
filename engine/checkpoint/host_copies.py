"""Copies of tensors in host memory, so that a training can go on while they are written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from typing import Any

import numpy
import torch
from torch import Tensor


class Staging:
    """Buffers that are used again by the next copy of a tensor of the same name; pinned where the device is CUDA.

    What an optimizer alone changes is copied while forward and backward passes run on: :meth:`hold` is to be called before the next
    optimizer step. On CUDA nothing waits on the host: the copies run on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: Any = None
        self._left: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, Tensor], later: Set[str]) -> dict[str, Tensor]:
        """The buffers of ``tensors``, filled when :meth:`finish` returns. Called on the training's thread, when the last copy is not read any more.

        Args:
            later: names of tensors that nothing but an optimizer step changes.
        """
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        self._buffers = dict(copies)
        for name, tensor in tensors.items():
            if name not in later:
                copies[name].copy_(tensor, non_blocking=True)
        self._left = [(copies[name], tensor) for name, tensor in tensors.items() if name in later]
        self._versions = [tensor._version for _, tensor in self._left]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._copy()
                self._event = self._stream.record_event()
        elif self._left:
            self._done.clear()
        return copies

    def finish(self) -> None:
        """Copy what is left. Called on the thread that writes."""
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
        """From here on the tensors may change."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        else:
            self._done.wait()

    def _copy(self) -> None:
        with torch.no_grad():
            for (copy, tensor), version in zip(self._left, self._versions, strict=True):
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    # Not torch's copy: in a thread of a process that was forked its thread pool fails.
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
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
