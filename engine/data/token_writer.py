"""Writes files of tokens in one pass: a file is complete, or not there."""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from engine.data.arguments import whole_number
from engine.data.documents import document_of
from engine.data.token_shards import DTYPES, PART, SAFETENSORS, WRITTEN_DTYPES, Tokens

_HEADER_BYTES = 4096
"""Bytes of the file before the tokens, which are reserved before it is known what the header says."""
_LONGEST_NAME = 1024
"""Characters of the tokenizer's name that are kept in the header."""
_BUFFER = 1 << 20
_TEXTS_AT_ONCE = 256
"""The number of texts that a tokenizer with a call for many gets at once."""
_CODES = {name: code for code, name in DTYPES.items()}
_SIZES = ("__len__", "vocab_size", "n_vocab", "get_vocab_size", "get_piece_size")
"""Attributes and methods by which tokenizers say how many tokens they know."""


class BadToken(ValueError):
    """A token that the file cannot hold."""


def write_token_file(path: Path, documents: Iterable[Any], dtype: str, tokenizer: str = "") -> int:
    """Write documents one after the other, and where each ends.

    Args:
        documents: sequences of tokens, or dicts with ``input_ids``.
        tokenizer: the name of the tokenizer, for the header.

    Returns:
        The number of tokens.

    Raises:
        BadToken: a token is negative or too large for ``dtype``.
        ValueError: there is no token, or an argument is not possible.
        TypeError: a document is not a sequence of tokens.
    """
    if path.suffix != SAFETENSORS:
        raise ValueError(f"{path}: a file of tokens is written as {SAFETENSORS}: give {path.stem}{SAFETENSORS}")
    if not isinstance(dtype, str) or dtype not in WRITTEN_DTYPES:
        raise ValueError(f"dtype={dtype!r}: tokens are written as {', '.join(map(repr, WRITTEN_DTYPES))}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb", buffering=_BUFFER) as file:
            total = _write(file, documents, dtype, tokenizer)
            if not total:
                raise ValueError(f"{path}: the documents have no token")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise
    os.replace(part, path)
    return total


def _write(file: BinaryIO, documents: Iterable[Any], dtype: str, tokenizer: str) -> int:
    largest = int(numpy.iinfo(dtype).max)
    ends, total = array("q"), 0
    file.write(bytes(_HEADER_BYTES))
    for number, sample in enumerate(documents):
        tokens = _tokens_of(sample, number)
        if len(tokens):
            _check_range(tokens, number, dtype, largest)
            file.write(tokens.astype(dtype).tobytes())
            total += len(tokens)
        ends.append(total)
    file.write(numpy.frombuffer(ends, dtype=numpy.int64).tobytes() if ends else b"")
    size = total * numpy.dtype(dtype).itemsize
    header = {
        "__metadata__": {"format": "tokens", "tokenizer": tokenizer[:_LONGEST_NAME]},
        "tokens": {"dtype": _CODES[dtype], "shape": [total], "data_offsets": [0, size]},
        "ends": {"dtype": "I64", "shape": [len(ends)], "data_offsets": [size, size + 8 * len(ends)]},
    }
    file.seek(0)
    # safetensors allows spaces after the header, and no gap between tensors.
    file.write(struct.pack("<Q", _HEADER_BYTES - 8) + json.dumps(header).encode().ljust(_HEADER_BYTES - 8))
    return total


def _tokens_of(sample: Any, number: int) -> Tokens:
    place = f"document {number}"
    if isinstance(sample, str):
        raise TypeError(f"{place} is a text: give tokenizer=, or its tokens")
    if isinstance(sample, Mapping) and "labels" in sample:
        raise TypeError(
            f"{place} has labels of its own, which a file of tokens does not keep: leave them out, or give Packed the data itself"
        )
    return document_of(sample, "input_ids", place).tokens


def _check_range(tokens: Tokens, number: int, dtype: str, largest: int) -> None:
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0:
        raise BadToken(f"document {number} has the token {lowest}: tokens are 0 or more")
    if highest > largest:
        wider = [name for name in WRITTEN_DTYPES if numpy.iinfo(name).max >= highest]
        raise BadToken(
            f"document {number} has the token {highest}, and {dtype} holds {largest} at most: "
            + (f"give dtype={wider[0]!r}" if wider else f"no tokenizer has so many tokens ({WRITTEN_DTYPES[-1]})")
        )


# -- texts -----------------------------------------------------------------------------------------------------------------------------------


class TextEncoder:
    """Turns texts into tokens with a user's tokenizer.

    Args:
        tokenizer: a tokenizer of Hugging Face, tiktoken or SentencePiece, or a function from a text to its tokens.
        end_token: a token that is added after each text; ``None``: none.

    Raises:
        TypeError: the tokenizer is none of these.
    """

    def __init__(self, tokenizer: Any, end_token: int | None = None) -> None:
        if isinstance(tokenizer, (str, type)) or not (callable(tokenizer) or hasattr(tokenizer, "encode")):
            raise TypeError(
                f"tokenizer={tokenizer!r:.80}: give a tokenizer with encode(text), or a function from a text to its tokens"
            )
        self.tokenizer, self.end = tokenizer, []
        if end_token is not None:
            text = f"TokenFile.write(end_token={end_token!r})"
            self.end = [whole_number(text, end_token, "the token that is added after each text", lowest=0)]

    def documents(self, texts: Iterable[str]) -> Iterator[list[int] | Tokens]:
        """Yield the tokens of each text.

        Raises:
            TypeError: a text is something else.
        """
        unread = iter(texts)
        start = 0
        while batch := list(islice(unread, _TEXTS_AT_ONCE)):
            for number, text in enumerate(batch, start):
                if not isinstance(text, str):
                    raise TypeError(
                        f"text {number} is {type(text).__name__}: tokenizer= needs texts; give one column of a table, or leave it out for tokens"
                    )
            start += len(batch)
            for encoded in self._encoded(batch):
                tokens = _tokens_in(encoded)
                yield [*tokens, *self.end] if self.end else tokens

    def _encoded(self, texts: list[str]) -> Iterable[Any]:
        """The tokenizer's result for each text; a tokenizer with a call for many texts gets all at once."""
        tokenizer = self.tokenizer
        if hasattr(tokenizer, "convert_tokens_to_ids"):
            # Not verbose: it would warn that texts are longer than its model's context.
            return list(tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"])
        if hasattr(tokenizer, "encode_ordinary_batch"):  # tiktoken's encode refuses texts that spell special tokens
            return list(tokenizer.encode_ordinary_batch(texts))
        if hasattr(tokenizer, "encode_batch"):
            return list(tokenizer.encode_batch(texts))
        return map(tokenizer if callable(tokenizer) else tokenizer.encode, texts)

    @property
    def dtype(self) -> str:
        """The dtype that all tokens of the tokenizer fit in; of one that does not tell how many it knows, ``"uint16"``."""
        sizes = [token + 1 for token in self.end]
        for name in _SIZES:
            value = getattr(self.tokenizer, name, None)
            value = value() if callable(value) else value
            sizes += [value] if isinstance(value, int) else []
        return "uint32" if max(sizes, default=0) > 2**16 else "uint16"

    @property
    def name(self) -> str:
        """A name of the tokenizer, by which shards that belong together are told; empty if it has none."""
        names = (getattr(self.tokenizer, attribute, None) for attribute in ("name_or_path", "name"))
        return next((name for name in names if isinstance(name, str)), "")


def _tokens_in(encoded: Any) -> Any:
    """The tokens in what a tokenizer returns for one text."""
    if isinstance(encoded, Mapping) or hasattr(encoded, "input_ids"):
        return encoded["input_ids"]
    return getattr(encoded, "ids", encoded)
