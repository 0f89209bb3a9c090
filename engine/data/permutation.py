"""Permutations of any size that are never stored: each index is computed on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine.data.sampler import Window, mixed

LARGE = 2**24
"""Samples from which on an epoch's order is a :class:`Permutation`: a list of this size takes 128 MiB and half a second per rank and epoch."""

_WORD = 0xFFFFFFFF
_BLOCK = 8192


class Permutation:
    """A permutation of ``range(size)`` that is a function of (seed, epoch), of which ``count`` entries are used.

    An alternating Feistel network permutes the numbers with as many bits as ``size - 1``; a result beyond ``size`` goes
    through it again until it is below (cycle walking: less than twice on average). See Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002. All products stay below 2**62, so that int64 gives the same on every platform.

    Raises:
        ValueError: ``size`` is negative or beyond 2**62, or ``count`` beyond ``size``.
    """

    def __init__(self, size: int, seed: int, epoch: int, count: int | None = None) -> None:
        self.size, self.count = size, size if count is None else count
        if not 0 <= self.count <= size <= 2**62:
            raise ValueError(
                f"a permutation of {size} numbers with {self.count} used: size must be 0 to 2**62, and count at most size"
            )
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._masks = (1 << (bits - bits // 2)) - 1, (1 << (bits // 2)) - 1
        key = mixed(seed, epoch)
        rounds = 8 if bits >= 16 else 16  # halves of a few bits mix slowly
        self._keys = [mixed(key, number) & _WORD for number in range(rounds)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        """An entry, or a list of those of a slice."""
        positions = range(self.count)[index]
        if isinstance(positions, range):
            return (
                self.at(torch.arange(positions.start, positions.stop, positions.step, device="cpu")).tolist()
                if positions
                else []
            )
        return int(self.at(torch.tensor([positions], device="cpu")))

    def at(self, positions: Tensor) -> Tensor:
        """The entries at ``positions``. Shapes ``[n]``, int64, on the CPU."""
        found = self._network(positions)
        outside = (found >= self.size).nonzero().squeeze(1)
        while outside.numel():
            again = self._network(found[outside])
            found[outside] = again
            outside = outside[again >= self.size]
        return found

    def pieces(self, windows: Iterable[Window]) -> Iterator[list[int]]:
        """The entries of each micro-batch; several are computed at once, which costs as much as one."""
        parts: list[range] = []
        waiting = 0
        for own, _ in windows:
            parts += own
            waiting += sum(map(len, own))
            if waiting >= _BLOCK:
                yield from self._split(parts)
                parts, waiting = [], 0
        yield from self._split(parts)

    def _split(self, parts: list[range]) -> Iterator[list[int]]:
        if parts:
            positions = torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
            yield from (piece.tolist() for piece in self.at(positions).split([len(part) for part in parts]))

    def _network(self, numbers: Tensor) -> Tensor:
        high, low = numbers >> self._low_bits, numbers & self._masks[1]
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = high ^ _scrambled(low, even).bitwise_and_(self._masks[0])
            low = low ^ _scrambled(high, odd).bitwise_and_(self._masks[1])
        return (high << self._low_bits).bitwise_or_(low)


def _scrambled(half: Tensor, key: int) -> Tensor:
    """A hash of numbers below 2**32 under a key; use its low 32 bits."""
    x = half ^ key
    x.bitwise_xor_(x >> 15).mul_(0x2C1B3C6D).bitwise_and_(_WORD)
    x.bitwise_xor_(x >> 12).mul_(0x297A2D39)
    return x.bitwise_xor_(x >> 15)
