"""A sum of numbers that stay on their device until it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.utils import accelerator

MANY = 256
"""Tensors are added up when this many wait."""


class Tally:
    """A running sum; adding to it computes nothing on a device, except once in :data:`MANY` times."""

    __slots__ = ("_sum", "_waiting")

    def __init__(self, total: float | None = None) -> None:
        """``total``: so far; ``None``: nothing was ever added."""
        self._sum = total
        self._waiting: list[Tensor] = []

    def add(self, number: Tensor | float) -> None:
        """Add a number; a tensor has one element and is not changed afterwards."""
        if isinstance(number, Tensor):
            self._waiting.append(number.detach())
            if len(self._waiting) < MANY:
                return
            self._waiting = [_total(self._waiting)]
        else:
            self._sum = (self._sum or 0) + number

    def total(self) -> float | None:
        """The sum; ``None``: nothing was ever added. Waits for the device if tensors were added since the last call."""
        if self._waiting:
            self._sum = (self._sum or 0) + _total(self._waiting).item()
            self._waiting = []
        return self._sum


def _total(numbers: list[Tensor]) -> Tensor:
    return torch.stack([number.reshape(()).to(accelerator.wide(number.device)) for number in numbers]).sum()
