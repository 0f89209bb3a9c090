"""Stands for the copies of activation offload in a plan: frees and takes the device's memory when a run does, and counts what crosses the link."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.planning import storages
from engine.planning.rank_trace import HostTraffic
from engine.planning.storages import StorageLog
from engine.transforms.offload import Crossing, HostCopies, SavedStorage


class TracedCopies(HostCopies):
    """Copies that only take and free memory of the device, for tensors without values.

    Args:
        memory: the log of the device's storages.
    """

    def __init__(self, memory: StorageLog) -> None:
        super().__init__(torch.device("cpu"))
        self._memory = memory
        self.weight = 1
        """How many micro-batches of the step each copy from now on represents."""

    def begin_step(self) -> None:
        """Count the bytes of a step from zero; the host's memory stays taken."""
        self.sent_bytes = self.returned_bytes = 0

    def traffic(self) -> HostTraffic:
        """The host's memory, and the bytes that have crossed the link since :meth:`begin_step`."""
        return HostTraffic(self.host_bytes, self.sent_bytes, self.returned_bytes)

    def current_stream(self) -> None:
        """Return no stream: everything runs in the order of the host."""
        return

    def send(self, leaving: list[SavedStorage]) -> Crossing:
        for storage in leaving:
            storage.host = self.buffer(storage)
            self.sent_bytes += self.weight * storage.nbytes
        return Crossing()

    def wait(self, stream: torch.Stream | None, crossing: Crossing) -> None:
        crossing.is_awaited = True

    def bring_back(self, returning: list[SavedStorage]) -> None:
        for storage in returning:
            storage.restored = torch.empty(storage.elements, dtype=storage.dtype)
            storage.arrival = Crossing()
            self._memory.set_kind([storage.restored], storages.ACTIVATIONS)
            self.returned_bytes += self.weight * storage.nbytes

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="meta")  # a shape: the device has no part in it
