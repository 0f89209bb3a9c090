"""``PackedStream``: packs a stream's documents into rows of one length while it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from engine.data.arguments import MOST, whole_number
from engine.data.data_states import load_state, stateful, states_of
from engine.data.documents import ROW_FIELDS, Document, document_of, row_of
from engine.data.epochs import tell_epoch
from engine.data.packing import check_row, checked_length, checked_token
from engine.data.user_loaders import presharded


class FillingRow:
    """A row that is being filled with documents."""

    def __init__(self, length: int) -> None:
        # Of 32 bits, since open rows are part of each state.
        self.tokens = numpy.empty(length, dtype=numpy.int32)
        self.labels = numpy.empty(length, dtype=numpy.int32)
        self.sizes: list[int] = []
        self.space = length

    @property
    def used(self) -> int:
        """The number of tokens in the row."""
        return len(self.tokens) - self.space

    def add(self, document: Document) -> None:
        start, count = self.used, len(document.tokens)
        if document.tokens.itemsize > self.tokens.itemsize and int(document.tokens.max()) > MOST:
            raise ValueError(
                f"a document has the token {int(document.tokens.max())}, and open rows keep tokens up to {MOST}: is the column one of tokens?"
            )
        self.tokens[start : start + count] = document.tokens
        self.labels[start : start + count] = document.tokens if document.labels is None else document.labels
        self.sizes.append(count)
        self.space -= count

    def sample(self, pad: int) -> dict[str, Tensor]:
        """The finished row, as :class:`engine.Packed` describes it."""
        whole, documents, start = Document(self.tokens, self.labels), [], 0
        for size in self.sizes:
            documents.append(whole.part(start, size))
            start += size
        return row_of(documents, len(self.tokens), pad)


class RowsInProgress:
    """The rows of one pass over a stream: those that are being filled, and full ones that were not yet taken."""

    def __init__(self, length: int, bins: int) -> None:
        self.length, self.bins = length, bins
        self.open: list[FillingRow] = []
        self.full: deque[FillingRow] = deque()
        self.over = False
        """Whether the stream has ended."""

    def add(self, document: Document) -> None:
        """Put a document into the open row with the least space in which it fits; without one, into a new row."""
        count = len(document.tokens)
        row = min((row for row in self.open if row.space >= count), key=_space, default=None)
        if row is None:
            while len(self.open) >= self.bins:
                self._finish(min(self.open, key=_space))
            row = FillingRow(self.length)
            self.open.append(row)
        row.add(document)
        if not row.space:
            self._finish(row)

    def end(self) -> None:
        """Finish all rows, since the stream has ended."""
        self.over = True
        for row in list(self.open):
            self._finish(row)

    def _finish(self, row: FillingRow) -> None:
        self.open.remove(row)
        self.full.append(row)

    def state_dict(self) -> dict[str, Any]:
        rows = [*self.open, *self.full]
        empty = numpy.empty(0, dtype=numpy.int32)
        tokens = numpy.concatenate([empty, *(row.tokens[: row.used] for row in rows)])
        labels = numpy.concatenate([empty, *(row.labels[: row.used] for row in rows)])
        return {
            "length": self.length,
            "over": self.over,
            "open": len(self.open),
            "sizes": [list(row.sizes) for row in rows],
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["length"] != self.length:
            raise ValueError(
                f"PackedStream(length={self.length}) is to continue from a state with rows of {state['length']} tokens: give that length, or "
                "start the training again"
            )
        whole, start = Document(state["tokens"].numpy(), state["labels"].numpy()), 0
        rows = []
        for sizes in state["sizes"]:
            row = FillingRow(self.length)
            for size in sizes:
                row.add(whole.part(start, size))
                start += size
            rows.append(row)
        self.over, self.open, self.full = state["over"], rows[: state["open"]], deque(rows[state["open"] :])


def _space(row: FillingRow) -> int:
    return row.space


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Rows of ``length`` tokens that are filled with whole documents of a stream; a row is that of :class:`engine.Packed`::

        rows = PackedStream(stream, length=2048, overflow="split")
        fit.run(module, DataLoader(rows, batch_size=8))

    A few rows are open at a time. Each document goes into the open row with the least space in which it fits; if it fits in none, the fullest row
    is given out. If the stream has a state, so has this: it contains the open rows, and a resume reads nothing again. A pass that is ended early
    leaves its open rows out.

    Args:
        dataset: the documents: an ``IterableDataset`` or another iterable that starts again with each ``iter``. It divides itself among workers.
        length: the number of tokens in a row.
        bins: the number of open rows. With 4, padding is below 1 % for documents that are short beside a row.
        overflow: what becomes of documents that are longer than a row: ``"split"`` into documents of their own, ``"truncate"`` or ``"drop"``;
            ``None``: such a document is an error when it is read.
        key: the name of the column with tokens.
        pad: the token at padding.

    Raises:
        TypeError: the data has indices, or (when it is read) a sample is not a document.
        ValueError: an argument is not possible.
    """

    def __new__(cls, dataset: Any = None, *args: Any, **kwargs: Any) -> PackedStream:
        # Whether a stream has a state is seen by its methods, so this class has them only where the documents have a state.
        return super().__new__(PackedStreamWithState if cls is PackedStream and stateful(dataset) else cls)

    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        bins: int = 4,
        overflow: str | None = None,
        key: str = "input_ids",
        pad: int = 0,
    ) -> None:
        length = checked_length("PackedStream", length)
        check_row("PackedStream", dataset, length, overflow, key)
        bins = whole_number(
            f"PackedStream(bins={bins!r})", bins, "the number of rows that are open at a time", highest=MOST
        )
        pad = checked_token("PackedStream", "pad", pad)
        is_map = isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)
        if is_map or isinstance(dataset, (list, tuple)) or not hasattr(dataset, "__iter__"):
            raise TypeError(
                f"PackedStream reads a stream, and {type(dataset).__name__} has indices or cannot be iterated: give "
                f"Packed(dataset, length={length}), or an IterableDataset"
            )
        self.dataset, self.length, self.bins, self.overflow, self.key, self.pad = (
            dataset,
            length,
            bins,
            overflow,
            key,
            pad,
        )
        self.sample_keys = ROW_FIELDS
        self.tokens_per_sample = length
        """The number of places in a row, padding included."""
        self._rows: RowsInProgress | None = None
        """The rows of the latest pass; ``None`` before the first."""
        self._loaded: RowsInProgress | None = None
        """The rows with which the next pass starts, from a state."""
        self._epoch: int | None = None
        """The epoch of the next pass, if it was told."""

    @property
    def presharded(self) -> bool | None:
        """Whether the stream is each rank's own shard, as the stream says."""
        return True if presharded(self.dataset) else getattr(self.dataset, "presharded", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream the epoch, if it has ``set_epoch``."""
        self._epoch = epoch
        tell_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows, self._loaded = self._loaded or RowsInProgress(self.length, self.bins), None
        self._rows = rows
        return self._pass(rows)

    def _pass(self, rows: RowsInProgress) -> Iterator[dict[str, Tensor]]:
        """Yield the rows of a pass. While one is yielded, ``rows`` has what follows it."""
        while rows.full:
            yield rows.full.popleft().sample(self.pad)
        if rows.over:
            return
        for number, sample in enumerate(self.dataset):
            for piece in self._pieces(document_of(sample, self.key, f"document {number} of this pass")):
                rows.add(piece)
            while rows.full:
                yield rows.full.popleft().sample(self.pad)
        rows.end()
        while rows.full:
            yield rows.full.popleft().sample(self.pad)

    def _pieces(self, document: Document) -> Iterator[Document]:
        """The parts of a document, each of which fits in a row."""
        count, length = len(document.tokens), self.length
        if count <= length:
            if count:
                yield document
        elif self.overflow == "split":
            yield from (document.part(start, length) for start in range(0, count, length))
        elif self.overflow == "truncate":
            yield document.part(0, length)
        elif self.overflow is None:
            raise ValueError(
                f"a document of {count} tokens is longer than a row of {length}: give overflow='split', 'truncate' or 'drop', or a larger length"
            )


class PackedStreamWithState(PackedStream):
    """A :class:`PackedStream` over a stream that has a state."""

    def state_dict(self) -> dict[str, Any]:
        rows = self._loaded or self._rows or RowsInProgress(self.length, self.bins)
        # A stream that has ended may have started again already: its state is not of this pass.
        stream = None if rows.over else states_of(dataset=self.dataset)
        return {"stream": stream, "epoch": self._epoch, "rows": rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = RowsInProgress(self.length, self.bins)
        rows.load_state_dict(state["rows"])
        if state["stream"] is not None:
            load_state(self.dataset, state["stream"]["dataset"])
        # Rows that an earlier epoch left open when it was ended are no part of the next.
        self._loaded = rows if state["epoch"] == self._epoch else None
