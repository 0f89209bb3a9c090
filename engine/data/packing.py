"""``Packed``: rows of one length that are filled with whole documents, packed once by best fit decreasing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from engine.config.kinds import parsed_stages
from engine.data.arguments import MOST, lengths_array, whole_number
from engine.data.documents import ROW_FIELDS, Document, document_of, row_of
from engine.data.epochs import tell_epoch
from engine.data.order import permutation
from engine.data.packed_rows import LengthSchedule
from engine.utils.checksums import checksum

Numbers = numpy.ndarray[Any, numpy.dtype[numpy.integer[Any]]]
OVERFLOWS = ("split", "truncate", "drop")
"""The ways to treat a document that is longer than a row."""
_READ_AT_ONCE = 1024
"""The number of documents that are read at once to measure them."""


class OpenRows:
    """Rows that have space left, by how much. Rows with the same space and the same number of items are one array ``[rows, items]``."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Numbers]] = {}
        self._spaces = 0
        """The bit ``s`` is set if rows with the space ``s`` exist, so that one shift finds the least space that suffices."""

    def take_rows(self, length: int) -> tuple[int, Numbers] | None:
        """Remove rows with the least space of at least ``length``, and return the space and the rows; ``None`` if there are no such rows."""
        fitting = self._spaces >> length
        if not fitting:
            return None
        space = length + (fitting & -fitting).bit_length() - 1
        rows = self.groups[space].pop()
        if not self.groups[space]:
            del self.groups[space]
            self._spaces ^= 1 << space
        return space, rows

    def add_rows(self, space: int, rows: Numbers) -> None:
        """Add rows that have ``space`` left."""
        self.groups.setdefault(space, []).append(rows)
        self._spaces |= 1 << space


def best_fit_decreasing(lengths: Numbers, capacity: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    """Pack items into rows of ``capacity``: the longest first, each into the row with the least space in which it fits.

    All items of one length are placed at once, which makes the cost of an item a fraction of a microsecond.

    Args:
        lengths: the length of each item, 1 to ``capacity``.
        seed: the seed of the order among items of one length.

    Returns:
        The items in the order of rows, and the end of each row: row ``r`` has ``items[ends[r - 1]:ends[r]]``.
    """
    shuffled = permutation(len(lengths), seed, 0).numpy()
    # Sorted as numbers of few bits, which is a radix sort.
    spaces = (capacity - lengths[shuffled]).astype(numpy.min_scalar_type(capacity))
    longest_first = numpy.argsort(spaces, kind="stable")
    spaces, items_by_length = spaces[longest_first], shuffled[longest_first]
    edges = [0, *(numpy.flatnonzero(spaces[1:] != spaces[:-1]) + 1).tolist(), len(lengths)]
    open_rows = OpenRows()
    for start, end in pairwise(edges):
        items, length = items_by_length[start:end], capacity - int(spaces[start])
        while len(items):
            new = -(-len(items) // (capacity // length))
            space, rows = open_rows.take_rows(length) or (capacity, numpy.empty((new, 0), dtype=numpy.int64))
            fit = space // length
            full = min(len(rows), len(items) // fit)
            if full:
                placed = items[: full * fit].reshape(full, fit)
                open_rows.add_rows(space - fit * length, numpy.concatenate((rows[:full], placed), axis=1))
                items, rows = items[full * fit :], rows[full:]
            if len(rows) and 0 < len(items) < fit:
                open_rows.add_rows(space - len(items) * length, numpy.concatenate((rows[:1], items[None]), axis=1))
                items, rows = items[:0], rows[1:]
            if len(rows):
                open_rows.add_rows(space, rows)
    parts = [rows for group in open_rows.groups.values() for rows in group]
    counts = numpy.concatenate([numpy.full(len(rows), rows.shape[1]) for rows in parts])
    return numpy.concatenate([rows.reshape(-1) for rows in parts]), counts.cumsum()


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of ``length`` tokens that are filled with whole documents of a map-style data set::

        rows = Packed(documents, length=2048, overflow="split")
        fit.run(module, DataLoader(rows, batch_size=8, shuffle=True))

    A row is a dict of tensors of shape ``[length]`` (int64):

    - ``input_ids``: the tokens; ``pad`` where no document is;
    - ``labels``: the same tokens, since a causal model's loss compares each with the place before. They are -100 at padding and at each document's
      first token. Labels that the data has of its own are used instead, and keep their -100;
    - ``position_ids``: from 0 on in each document, 0 at padding;
    - ``document_ids``: the number of the document in the row, -1 at padding.

    There is no ``attention_mask``, because a mask of two dimensions lets documents see each other. Attention keeps documents apart by
    ``position_ids``, or by :func:`engine.document_mask` and :func:`engine.document_lengths`. Other columns of the data are left out.

    The documents are packed once, by best fit decreasing, the same in each process. A run shuffles rows, so it resumes on any number of ranks.

    Args:
        dataset: documents, each a sequence of tokens or a dict with tokens under ``key``, and perhaps ``labels``. ``len`` and indices are needed.
        length: the number of tokens in a row. Or by stage of a training, ``{0: 1024, "5e8 tokens": 2048}``: starts are durations in samples, tokens,
            steps or epochs, and lengths divide the longest. Rows are packed with the longest, and :class:`engine.Fit` cuts those of a stage into
            equal parts, so that a step has the same tokens in each.
        lengths: the number of tokens in each document: a sequence, or the name of a column. ``None``: the data set's attribute ``lengths``, or else
            all documents are read once to measure them.
        overflow: what becomes of documents that are longer than a row: ``"split"`` into documents of their own, ``"truncate"`` or ``"drop"``.
        key: the name of the column with tokens.
        pad: the token at padding.
        seed: the seed of the order in which documents of one length are packed.

    Raises:
        ValueError: a document is longer than a row and ``overflow`` is not given, no document has a token, or ``lengths`` does not fit the data.
        TypeError: the data is a stream, or a sample is not a document.
    """

    def __init__(
        self,
        dataset: Any,
        length: int | Mapping[Any, int],
        *,
        lengths: Any = None,
        overflow: str | None = None,
        key: str = "input_ids",
        pad: int = 0,
        seed: int = 0,
    ) -> None:
        self.length_schedule = length_schedule(length) if isinstance(length, Mapping) else None
        """The lengths by stage of a training; ``None``: all rows have one length."""
        length = checked_length("Packed", length) if self.length_schedule is None else self.length_schedule.longest
        check_row("Packed", dataset, length, overflow, key)
        seed = whole_number(
            f"Packed(seed={seed!r})", seed, "the seed of the order in which documents are packed", lowest=-(2**62)
        )
        pad = checked_token("Packed", "pad", pad)
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"Packed needs a map-style data set, and {type(dataset).__name__} is a stream: give PackedStream(dataset, length={length})"
            )
        self.dataset, self.length, self.key, self.pad = dataset, length, key, pad
        self.sample_keys = ROW_FIELDS
        self.tokens_per_sample = length
        """The number of places in a row, padding included."""
        if not len(dataset):
            raise ValueError(
                "Packed: none of the 0 documents has a token to pack, because the data set is empty: check its data"
            )
        self.lengths = self._measured() if lengths is None else self._checked(lengths)
        pieces = _pieces(self.lengths, length, overflow)
        if not len(pieces.counts):
            cut = f", or overflow={overflow!r}" if overflow else ""
            raise ValueError(f"Packed: none of the {len(dataset)} documents has a token to pack: check the data{cut}")
        items, self.ends = best_fit_decreasing(pieces.counts, length, seed)
        self._pieces = pieces.reordered(items)
        self.tokens = int(pieces.counts.sum(dtype=numpy.int64))
        """The number of tokens of documents in all rows."""

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def plan_checksum(self) -> int:
        """A checksum of the documents' places in the rows."""
        return checksum_of_arrays(self._pieces.documents, self._pieces.starts, self._pieces.counts, self.ends)

    @property
    def fill(self) -> float:
        """The part of all places that documents fill; the rest is padding."""
        return self.tokens / (len(self) * self.length)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Tensor]]:
        """The rows with these indices. Their documents are read at once if the data set has ``__getitems__``."""
        parts = [self._pieces.of_row(self.ends, range(len(self))[row]) for row in rows]
        numbers = list({number: None for part in parts for number, _, _ in part})
        documents = dict(zip(numbers, self._read(numbers), strict=True))
        for number, document in documents.items():
            if len(document.tokens) != self.lengths[number]:
                raise ValueError(
                    f"document {number} of Packed has {len(document.tokens)} tokens, and lengths says {self.lengths[number]}: give the lengths of "
                    "this data, or None to measure them"
                )
        return [
            row_of([documents[number].part(start, count) for number, start, count in part], self.length, self.pad)
            for part in parts
        ]

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set the epoch, if it has ``set_epoch``."""
        tell_epoch(self.dataset, epoch)

    def _read(self, numbers: Sequence[int]) -> list[Document]:
        """Read documents by their numbers."""
        read_all = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[number] for number in numbers] if read_all is None else read_all(list(numbers))
        return [
            document_of(sample, self.key, f"document {number}") for number, sample in zip(numbers, samples, strict=True)
        ]

    def _measured(self) -> Numbers:
        """The documents' lengths: those that the data set knows, or else counted."""
        total = len(self.dataset)
        stored_lengths = getattr(self.dataset, "lengths", None)
        if isinstance(stored_lengths, (numpy.ndarray, Tensor)) and stored_lengths.shape == (total,):
            return self._checked(stored_lengths)
        counts = numpy.empty(total, dtype=numpy.int64)
        for start in range(0, total, _READ_AT_ONCE):
            numbers = range(start, min(start + _READ_AT_ONCE, total))
            counts[start : numbers.stop] = [len(document.tokens) for document in self._read(numbers)]
        return counts

    def _checked(self, lengths: Any) -> Numbers:
        """The lengths that the user gives, or that a column has, as an array.

        Raises:
            ValueError, TypeError: they are no lengths of this data.
        """
        total = len(self.dataset)
        name = lengths if isinstance(lengths, str) else None
        if name is not None:
            lengths = self._column(name)
        description = "lengths" if name is None else f"the column {name!r}"
        array = lengths_array(f"Packed: {description}", lengths)
        if array.shape != (total,):
            raise ValueError(
                f"Packed: {description} has the shape {list(array.shape)}, and the data set {total} documents"
            )
        if total and array.dtype.kind not in "iu":
            raise TypeError(
                f"Packed: {description} has the dtype {array.dtype}: give whole numbers, the tokens of each document"
            )
        if total and int(array.min()) < 0:
            raise ValueError(f"Packed: {description} has a negative length, {int(array.min())}")
        if total and int(array.max()) > 2**62:
            raise ValueError(
                f"Packed: {description} has the length {int(array.max())}: give the tokens of each document"
            )
        return array.astype(numpy.int64)

    def _column(self, name: str) -> Any:
        """The values of a column.

        Raises:
            TypeError: the data set has no such column.
        """
        columns, kind = getattr(self.dataset, "column_names", None), ""
        if columns is None:
            first = self.dataset[0]
            columns, kind = list(first) if isinstance(first, Mapping) else None, type(first).__name__
        if columns is None or name not in columns:
            has = f"has the columns {', '.join(map(str, columns))}" if columns else f"has samples of type {kind}"
            raise TypeError(
                f"Packed(lengths={name!r}) names a column, and the data set {has}: give the name of one, a sequence of numbers, or None to measure"
            )
        if hasattr(self.dataset, "column_names"):
            return self.dataset[name]
        return [self.dataset[number][name] for number in range(len(self.dataset))]


class _Pieces:
    """Parts of documents, by the number of the document, the first token and the number of tokens. Shapes ``[pieces]``."""

    def __init__(self, documents: Numbers, starts: Numbers, counts: Numbers) -> None:
        self.documents, self.starts, self.counts = documents, starts, counts

    def reordered(self, items: Numbers) -> _Pieces:
        """The pieces in another order, in arrays of half the size where their numbers allow that."""
        arrays = (array[items] for array in (self.documents, self.starts, self.counts))
        return _Pieces(*(array.astype(numpy.min_scalar_type(array.max())) for array in arrays))

    def of_row(self, ends: Numbers, row: int) -> list[tuple[int, int, int]]:
        """The pieces of a row, each as (document, first token, number of tokens)."""
        span = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
        columns = (array[span].tolist() for array in (self.documents, self.starts, self.counts))
        return list(zip(*columns, strict=True))


def _pieces(lengths: Numbers, length: int, overflow: str | None) -> _Pieces:
    """The pieces into which documents are cut so that each fits in a row; empty documents have none.

    Raises:
        ValueError: a document does not fit, and ``overflow`` is ``None``.
    """
    longer = lengths > length
    if overflow is None and longer.any():
        raise ValueError(
            f"{int(longer.sum())} of {len(lengths)} documents are longer than a row of {length} tokens, the longest (document "
            f"{int(lengths.argmax())}) has {int(lengths.max())}: give overflow='split', 'truncate' or 'drop', or a larger length"
        )
    if overflow == "split":
        parts = -(-lengths // length)
        documents = numpy.arange(len(lengths)).repeat(parts)
        starts = (numpy.arange(len(documents)) - (parts.cumsum() - parts).repeat(parts)) * length
        return _Pieces(documents, starts, numpy.minimum(lengths[documents] - starts, length))
    documents = ((lengths > 0) & ~longer if overflow == "drop" else lengths > 0).nonzero()[0]
    return _Pieces(documents, numpy.zeros_like(documents), numpy.minimum(lengths[documents], length))


def checksum_of_arrays(*arrays: Numbers) -> int:
    """A checksum of whole numbers, whatever their dtypes are."""
    value = 0
    for array in arrays:
        value = checksum(torch.from_numpy(array.astype(numpy.int64)), value)
    return value


def checked_length(name: str, length: Any) -> int:
    """The ``length`` of rows as an int."""
    return whole_number(f"{name}(length={length!r})", length, "the number of tokens in a row", highest=MOST)


def checked_token(name: str, argument: str, token: Any) -> int:
    """A token that the user gives, as an int."""
    return whole_number(f"{name}({argument}={token!r})", token, "a token of the vocabulary", lowest=0, highest=MOST)


def length_schedule(setting: Mapping[Any, Any]) -> LengthSchedule:
    """Read the ``length`` of :class:`engine.Packed` if it is a dict.

    Raises:
        ValueError, TypeError: a start or a length is not possible, or a length does not divide the longest.
    """
    name = "Packed(length=...)"
    stages = [
        (start, whole_number(f"Packed(length={setting!r})", length, "the number of tokens in a row", highest=MOST))
        for start, length in parsed_stages(name, setting)
    ]
    schedule = LengthSchedule(tuple(start for start, _ in stages), tuple(length for _, length in stages))
    for length in schedule.lengths:
        if schedule.longest % length:
            divisors = [n for n in range(1, schedule.longest + 1) if not schedule.longest % n]
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - length))[:2])
            raise ValueError(
                f"{name}: rows of {schedule.longest} tokens cannot be cut into parts of {length}; nearest possible: {', '.join(map(str, nearest))}"
            )
    return schedule


def check_row(name: str, dataset: Any, length: int, overflow: str | None, key: str) -> None:
    """Check the arguments that :class:`Packed` and :class:`engine.PackedStream` have in common.

    Raises:
        TypeError, ValueError: an argument is not possible.
    """
    if not isinstance(key, str):
        raise TypeError(f"{name}(key={key!r}): give the name of the column with the tokens, such as 'input_ids'")
    is_scalar = isinstance(dataset, Tensor) and not dataset.dim()
    if isinstance(dataset, (str, bytes, Mapping)) or dataset is None or is_scalar:
        raise TypeError(
            f"{name} packs documents, and got {type(dataset).__name__}: {dataset!r:.60}. Give a data set of token sequences, or of dicts with {key!r}"
        )
    if hasattr(dataset, "seeded"):
        raise TypeError(
            f"{name} over {type(dataset).__name__} would pack draws of one seed, the same in every epoch: pack each source, and mix the packed rows, "
            f"Mixture({{'web': {name}(web, length={length}), ...}})"
        )
    if overflow is not None and (not isinstance(overflow, str) or overflow not in OVERFLOWS):
        raise ValueError(
            f"{name}(overflow={overflow!r}): possible: {', '.join(map(repr, OVERFLOWS))}, or None for an error"
        )
