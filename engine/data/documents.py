"""Documents in rows of tokens: how a sample shows its tokens and labels, the row that several documents make, and who may see whom in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from engine.data.packed_rows import IGNORED

PADDING = -1
"""The document's number at places that no document fills."""

ROW_FIELDS = ("input_ids", "labels", "position_ids", "document_ids")
"""The keys of a packed row."""

Tokens = numpy.ndarray[Any, numpy.dtype[numpy.integer[Any]]]
"""Tokens or labels. Shape ``[tokens]``, any dtype of whole numbers."""


class Document(NamedTuple):
    """A document's tokens, and its labels if the data has labels of its own."""

    tokens: Tokens
    labels: Tokens | None

    def part(self, start: int, count: int) -> Document:
        """The document's ``count`` tokens from ``start`` on."""
        end = start + count
        return Document(self.tokens[start:end], None if self.labels is None else self.labels[start:end])


def document_of(sample: Any, key: str, place: str) -> Document:
    """The document in a sample of a user's data set: a sequence of tokens, or a dict with tokens under ``key`` and perhaps with ``labels``.

    Args:
        place: a name of the sample, for errors.

    Raises:
        TypeError, ValueError: the sample is not a document, has labels of another length, or has padding.
    """
    if not isinstance(sample, Mapping):
        return Document(_whole_numbers(sample, place), None)
    if key not in sample:
        raise TypeError(
            f"{place} has the keys {', '.join(map(str, sample))}, and no {key!r}: give key=, the name of the column with the tokens"
        )
    tokens, labels = _whole_numbers(sample[key], f"{key!r} of {place}"), sample.get("labels")
    mask = sample.get("attention_mask")
    if mask is not None and not numpy.asarray(mask).all():
        raise ValueError(
            f"{place} has padding (zeros in its attention_mask), which would be trained as text: tokenize without padding"
        )
    if labels is None:
        return Document(tokens, None)
    labels = _whole_numbers(labels, f"'labels' of {place}")
    if len(labels) != len(tokens):
        raise ValueError(
            f"{place} has {len(tokens)} tokens and {len(labels)} labels: give each token its label, {IGNORED} where it has none"
        )
    return Document(tokens, labels)


def _whole_numbers(values: Any, place: str) -> Tokens:
    array = numpy.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(
            f"{place} must be a sequence of whole numbers, one for each token, and is {type(values).__name__} "
            f"of shape {list(array.shape)} and dtype {array.dtype}"
        )
    return array if array.size else array.astype(numpy.int64)


def row_of(documents: Sequence[Document], length: int, pad: int) -> dict[str, Tensor]:
    """One row of documents and padding: the fields that :class:`engine.Packed` describes. Shapes ``[length]``, int64."""
    sizes = numpy.array([len(document.tokens) for document in documents])
    ends = sizes.cumsum()
    starts, used = ends - sizes, int(ends[-1])
    fields = numpy.empty((4, length), dtype=numpy.int64)
    tokens, labels, positions, numbers = fields
    tokens[used:], labels[used:], positions[used:], numbers[used:] = pad, IGNORED, 0, PADDING
    numpy.concatenate([document.tokens for document in documents], out=tokens[:used], casting="unsafe")
    if int(tokens[:used].min(initial=0)) < 0:
        raise ValueError(
            f"a document has the token {int(tokens[:used].min())}, and tokens are 0 or more: is the column one of labels, or are the tokens too "
            "large for int64? Give key=, the name of the column with the tokens"
        )
    labels[:used] = tokens[:used]
    for document, start, end in zip(documents, starts, ends, strict=True):
        if document.labels is not None:
            labels[start:end] = document.labels
    labels[starts] = IGNORED  # no token before it belongs to its document
    numbers[:used] = numpy.arange(len(sizes)).repeat(sizes)
    positions[:used] = numpy.arange(used) - starts.repeat(sizes)
    return dict(zip(ROW_FIELDS, torch.from_numpy(fields), strict=True))


def _wrong_tensor(function: str, argument: str, value: Any, shape: str) -> ValueError | TypeError:
    """The error for what is not a tensor of such a shape."""
    if isinstance(value, Tensor):
        return ValueError(f"{function}: {argument} have the shape {list(value.shape)}: give {shape}")
    return TypeError(
        f"{function}: {argument} is {type(value).__name__}: give the tensor of this name from a batch of packed rows, {shape}"
    )


def _check_whole(function: str, argument: str, numbers: Tensor) -> None:
    """Refuse a tensor of anything but whole numbers."""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(
            f"{function}: {argument} have the dtype {numbers.dtype}: give whole numbers, as packed rows have them"
        )


class DocumentLengths(NamedTuple):
    """The documents of flattened rows, as kernels for sequences of unequal length take them (``flash_attn_varlen_func``, ``varlen_attn``)."""

    cu_seqlens: Tensor
    """Where each document starts in the flattened rows, and the end of the last. Shape ``[documents + 1]``, int32. Each place of padding counts as a
    document."""
    longest: int
    """The number of tokens in the longest document."""


def document_lengths(position_ids: Tensor) -> DocumentLengths:
    """The documents of packed rows, from positions that start at 0 in each document.

    On a device this waits for it: call it in the collate function. A row starts a document even if its first position is not 0.

    Args:
        position_ids: shape ``[rows, tokens]`` or ``[tokens]``.

    Raises:
        ValueError: the positions have another shape, or no token.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2) or not position_ids.numel():
        raise _wrong_tensor("document_lengths", "position_ids", position_ids, "[rows, tokens], or [tokens] of one row")
    _check_whole("document_lengths", "position_ids", position_ids)
    starts = position_ids.reshape(-1, position_ids.shape[-1]) == 0
    starts[:, 0] = True
    places = starts.reshape(-1).nonzero().squeeze(1)
    end = torch.tensor([position_ids.numel()], device=places.device)
    edges = torch.cat([places, end]).to(torch.int32)
    return DocumentLengths(edges, int(edges.diff().max()))


def document_mask(document_ids: Tensor, *, causal: bool = True, dense: bool = False) -> BlockMask | Tensor:
    """The mask with which each token of packed rows sees its own document only, for ``flex_attention``.

    Padding sees padding, so that no row of attention is empty.

    Args:
        document_ids: the document of each token. Shape ``[rows, tokens]``.
        causal: whether a token sees no later ones.
        dense: return a bool tensor of shape ``[rows, 1, tokens, tokens]`` for ``scaled_dot_product_attention`` instead of a ``BlockMask``.

    Raises:
        ValueError: ``document_ids`` have another shape.
    """
    if not isinstance(document_ids, Tensor) or document_ids.dim() != 2 or not document_ids.numel():
        raise _wrong_tensor("document_mask", "document_ids", document_ids, "[rows, tokens]")
    _check_whole("document_mask", "document_ids", document_ids)
    rows, tokens = document_ids.shape
    if dense:
        same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]
        return same_document.tril() if causal else same_document

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = document_ids[row, query] == document_ids[row, key]
        return same_document & (query >= key) if causal else same_document

    return create_block_mask(sees, rows, None, tokens, tokens, device=str(document_ids.device))
