"""The entries that a user's sampler has yielded, in arrays where they are integers: 8 bytes an index, where a list takes 40."""

from __future__ import annotations

import itertools
import struct
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 8192
"""Entries that are drawn before they are put into an array."""
_BLOCK_OF_BATCHES = 64
"""Entries that are drawn before they are put into an array, if they are lists or tuples."""


def collected(entries: Iterable[Any]) -> SamplerEntries:
    """Read all entries of a sampler. They come back as they were, of the same types.

    Arrays take integers (Python's, numpy's, tensors without a dimension) and lists or tuples of such, as long as all are of one type. From the first
    entry of another type on, all are kept in a list.
    """
    iterator = iter(entries)
    first = list(itertools.islice(iterator, 1))
    if not first:
        return ListedEntries([])
    store: BatchEntries | IndexEntries | None = (
        BatchEntries(type(first[0])) if type(first[0]) in (list, tuple) else _indices_like(first[0])
    )
    if store is None:
        return ListedEntries([*first, *iterator])
    size = _BLOCK_OF_BATCHES if isinstance(store, BatchEntries) else _BLOCK
    block = [*first, *itertools.islice(iterator, size - 1)]
    while block:
        if not store.add(block):
            return ListedEntries([*store, *block, *iterator])
        block = list(itertools.islice(iterator, size))
    return store


class SamplerEntries(Sequence[Any]):
    """The order that a sampler has yielded: indices, batches of indices, or any keys of a dataset.

    Implementations: :class:`IndexEntries`, :class:`BatchEntries`, and :class:`ListedEntries` for everything else. A slice is a list.
    """

    @abstractmethod
    def checksum(self) -> int:
        """A checksum of all entries, which a checkpoint keeps."""

    def has_checksum(self, saved: int) -> bool:
        """Whether a checkpoint's checksum is that of these entries."""
        return saved == self.checksum()

    def size_of(self, number: int) -> int:
        """The number of samples in entry ``number``, a batch."""
        return len(self[number])

    def indices(self) -> set[Any]:
        """All indices, also those in batches.

        Raises:
            TypeError: an entry cannot be an element of a set.
        """
        return {index for entry in self for index in (entry if isinstance(entry, (list, tuple)) else (entry,))}

    def is_disjoint(self, other: SamplerEntries) -> bool:
        """Whether these entries have no index in common with ``other``; ``False`` if that is not known."""
        try:
            return not self.indices() & other.indices()
        except TypeError:
            return False


class ListedEntries(SamplerEntries):
    """Entries of any types."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def checksum(self) -> int:
        try:
            data = torch.tensor(self.items, dtype=torch.int64).numpy().tobytes()
        except (TypeError, ValueError, RuntimeError):  # batches of unequal sizes, or keys that are not numbers
            data = repr(self.items).encode()
        return zlib.crc32(data)


class IndexEntries(SamplerEntries):
    """Integers of one type.

    Args:
        kind: ``int``, ``Tensor`` (without a dimension, int64, on the CPU) or a type of numpy.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self._dtype = np.dtype(np.int64 if kind in (int, Tensor) else kind)
        self._bytes = bytearray()  # which grows in place

    def add(self, block: list[Any]) -> bool:
        """Add entries, if all are of this type; else return ``False``."""
        data = (
            _bytes_of_integers(block)
            if self.kind is int
            else _bytes_of_tensors(block)
            if self.kind is Tensor
            else np.array(block, self._dtype).tobytes()
            if set(map(type, block)) == {self.kind}
            else None
        )
        if data is None:
            return False
        self._bytes += data
        return True

    @property
    def numbers(self) -> NDArray[np.integer[Any]]:
        """The indices. Shape ``[entries]``; a view."""
        return np.frombuffer(self._bytes, self._dtype) if self._bytes else np.empty(0, self._dtype)

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def __getitem__(self, index: Any) -> Any:
        part = self.numbers[index]
        if self.kind is int:
            return part.tolist()
        if self.kind is not Tensor:
            return list(part) if isinstance(index, slice) else part
        return list(torch.from_numpy(part.copy())) if isinstance(index, slice) else torch.tensor(int(part))

    def __iter__(self) -> Iterator[Any]:
        for low in range(0, len(self), _BLOCK):
            yield from self[low : low + _BLOCK]

    def checksum(self) -> int:
        return zlib.crc32(self.numbers.astype(np.int64, copy=False).data)

    def is_disjoint(self, other: SamplerEntries) -> bool:
        if isinstance(other, IndexEntries):
            return not np.isin(self.numbers, other.numbers).any()
        return super().is_disjoint(other)


class BatchEntries(SamplerEntries):
    """Batches: lists or tuples of integers, in one array with the place of each batch's end.

    Args:
        kind: ``list`` or ``tuple``.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self._indices = IndexEntries(int)
        self._ends = IndexEntries(int)

    def add(self, block: list[Any]) -> bool:
        """Add batches, if all are of this type with integers of one type in them; else return ``False``."""
        if set(map(type, block)) != {self.kind}:
            return False
        indices = list(itertools.chain.from_iterable(block))
        if indices and not len(self._indices):
            empty = _indices_like(indices[0])
            if empty is None:
                return False
            self._indices = empty
        if indices and not self._indices.add(indices):
            return False
        last = self._ends[-1] if len(self._ends) else 0
        return self._ends.add(list(itertools.accumulate(map(len, block), initial=last))[1:])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        stop = self._ends[index]
        return self.kind(self._indices[stop - self.size_of(index) : stop])

    def size_of(self, number: int) -> int:
        number = range(len(self))[number]
        return int(self._ends[number]) - (int(self._ends[number - 1]) if number else 0)

    def checksum(self) -> int:
        return (
            self._indices.checksum()
            if self._are_even()
            else zlib.crc32(self._ends.numbers.data, self._indices.checksum())
        )

    def has_checksum(self, saved: int) -> bool:
        # Of uneven batches, checkpoints had that of a text.
        return super().has_checksum(saved) or (not self._are_even() and saved == self._checksum_of_text())

    def _are_even(self) -> bool:
        return len(np.unique(np.diff(self._ends.numbers, prepend=0))) <= 1

    def _checksum_of_text(self) -> int:
        total = zlib.crc32(b"[")
        for number, batch in enumerate(self):
            total = zlib.crc32((", " * bool(number) + repr(batch)).encode(), total)
        return zlib.crc32(b"]", total)


def _indices_like(entry: Any) -> IndexEntries | None:
    """An empty array for entries of this one's type; ``None`` if it takes none."""
    kind = type(entry)
    if kind is Tensor and not (entry.dim() == 0 and entry.dtype is torch.int64 and entry.device.type == "cpu"):
        return None
    is_numpys = isinstance(entry, np.integer) and np.can_cast(entry.dtype, np.int64)
    return IndexEntries(kind) if kind in (int, Tensor) or is_numpys else None


def _bytes_of_integers(block: list[Any]) -> bytes | None:
    """The int64 values of Python's integers; ``None`` if some are of another type, or too large.

    A sum has another type where an entry has one. That costs a third of asking each entry, and finds all but booleans and integers of a subclass that
    lie between plain ones.
    """
    try:
        if type(block[0]) is type(block[-1]) is type(sum(block)) is int:
            return struct.pack(f"{len(block)}q", *block)
    except (TypeError, ValueError, RuntimeError, struct.error):  # texts and others, which have no sum
        pass
    return None


def _bytes_of_tensors(block: list[Any]) -> bytes | None:
    """The values of tensors without a dimension; ``None`` if some are something else."""
    if set(map(type, block)) != {Tensor}:
        return None
    if any(entry.dim() or entry.dtype is not torch.int64 or entry.device.type != "cpu" for entry in block):
        return None
    return torch.stack(block).numpy().tobytes()
