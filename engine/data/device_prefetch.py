"""Copies to the device beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.data.indexed import Micro
from engine.utils.tree import map_tensors


class Side(Protocol):
    """Where copies are made while the device computes."""

    def copy(self, batch: Any) -> Any:
        """Start copying; the result may be used after :meth:`join`."""

    def join(self) -> None:
        """Let what is computed from now on wait for the copies that were started."""


class SideStream:
    """A CUDA stream beside the one that computes.

    A copy waits for what was queued for computation before it. That is what makes it safe: memory that a used batch has given back may be
    the new copy's, and no ``record_stream`` is needed, which would not see the tensors inside a batch of a class of its own. As the copy
    is started before its batch's forerunner is computed, it still runs beside that one's computation.
    """

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self.device, self.move = device, move
        self.stream = torch.cuda.Stream(device)

    def copy(self, batch: Any) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            return self.move(pinned(batch))

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def pinned(batch: Any) -> Any:
    """``batch`` with its CPU tensors in pinned memory: a copy from other memory holds up the host until it is done."""

    def pin(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor

    if not isinstance(batch, (Tensor, list, tuple, dict)) and callable(getattr(batch, "to", None)):
        return batch.pin_memory() if callable(getattr(batch, "pin_memory", None)) else batch
    return map_tensors(pin, batch)


def ahead(micros: Iterator[Micro], side: Side, across: bool) -> Iterator[Micro]:
    """``micros`` on the device: while one is computed, the next is copied, and no more than that one.

    Args:
        across: whether a window's last micro-batch lets the next window's first be read already.
    """
    waiting: Micro | None = None
    for batch, share in micros:
        copied = side.copy(batch), share
        if waiting is not None:
            yield waiting
        side.join()
        waiting = copied
        if share.last and not across:
            yield waiting
            waiting = None
    if waiting is not None:
        yield waiting
