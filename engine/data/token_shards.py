"""One file of tokens on the disk: safetensors with ``tokens`` and ``ends``, NumPy's ``.npy``, or raw numbers (nanoGPT's ``.bin``), memory-mapped."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

Tokens = numpy.ndarray[Any, numpy.dtype[numpy.integer[Any]]]
"""Tokens, ends or lengths of documents. Shape ``[n]``."""

DTYPES = {"U8": "uint8", "U16": "uint16", "U32": "uint32", "I32": "int32", "I64": "int64"}
"""The dtypes of tokens that are read, by their names in safetensors files."""
WRITTEN_DTYPES = ("uint8", "uint16", "uint32")
"""The dtypes of tokens that are written."""
SAFETENSORS, NPY, RAW = ".safetensors", ".npy", ".bin"
ENDINGS = (SAFETENSORS, NPY, RAW)
PART = ".part"
"""Added to the name of a file that is being written."""
_MOST_HEADER_BYTES = 100_000_000
"""The largest header that safetensors allows."""
_HEADERS_OF_RAW = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""The first two numbers of raw files that begin with 256 numbers of 32 bits (llm.c, modded-nanogpt), and the dtype that they stand for. The third
is the number of tokens."""
_BYTES_OF_RAW_HEADER = 1024
_ADVICE = "write it again, with TokenFile.write or fit tokens"


class Region(NamedTuple):
    """An array in a file."""

    offset: int
    """Bytes of the file before the array."""
    dtype: str
    size: int
    """The number of entries."""

    def mapped(self, path: Path) -> Tokens:
        """The array, mapped from a file."""
        if not self.size:
            return numpy.empty(0, self.dtype)
        # A plain array over the same memory: a slice of a numpy.memmap costs several times as much.
        mapped = numpy.memmap(path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.size,))
        return mapped.view(numpy.ndarray)


@dataclass
class TokenShard:
    """A file of tokens. What is sent to another process is only where its arrays are: they are mapped there again."""

    path: Path
    tokens_region: Region
    ends_region: Region | None
    """Where the ends of documents are; ``None``: the file does not say."""
    tokenizer: str = ""
    """The tokenizer, if the file names it."""

    def __post_init__(self) -> None:
        self.is_signed = numpy.dtype(self.tokens_region.dtype).kind == "i"
        """Whether the dtype allows negative numbers."""
        try:
            self.tokens = self.tokens_region.mapped(self.path)
            self.ends = None if self.ends_region is None else self.ends_region.mapped(self.path)
        except ValueError as error:  # it has become shorter since its header was read, perhaps in another process
            raise ValueError(f"{self.path} has changed since it was opened: {error}") from None
        if self.ends is None:
            return
        total = len(self.tokens)
        if (int(self.ends[-1]) if len(self.ends) else 0) != total:
            raise ValueError(
                f"{self.path} is damaged: its last document does not end with token {total:,}, the last one; {_ADVICE}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("tokens", "ends")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @property
    def lengths(self) -> Tokens:
        """The number of tokens in each document. Shape ``[documents]``, int64.

        Raises:
            ValueError: the ends of documents do not rise.
        """
        assert self.ends is not None
        lengths = numpy.diff(self.ends, prepend=self.ends.dtype.type(0))
        if len(lengths) and int(lengths.min()) < 0:
            raise ValueError(
                f"{self.path} is damaged: document {int(lengths.argmin())} ends before it begins; {_ADVICE}"
            )
        return lengths


def shards_at(path: Path, dtype: str | None) -> list[TokenShard]:
    """The file at ``path``, or in the order of their names all files of tokens in the folder ``path``.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder has no file of tokens.
        ValueError, TypeError: a file is incomplete or no file of tokens, or those of a folder do not belong together.
    """
    if not path.is_dir():
        return [shard_of(path, dtype)]
    files = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    unfinished = [file.name for file in files if file.name.endswith(PART)]
    if unfinished:
        raise ValueError(
            f"{path} has {unfinished[0]}: a shard is still being written, or its writer was interrupted. Write that shard again, or remove the file"
        )
    files = [file for file in files if file.suffix in ENDINGS]
    if not files:
        raise FileNotFoundError(f"{path} has no file of tokens ({', '.join(ENDINGS)})")
    shards = [shard_of(file, dtype) for file in files]
    _refuse_mixed(shards)
    return shards


def _refuse_mixed(shards: list[TokenShard]) -> None:
    """Refuse shards that differ in what they say about their tokens: they come from other tokenizers, or from other data."""
    descriptions = [
        (
            f"the ending {shard.path.suffix}",
            f"tokens of {shard.tokens_region.dtype}",
            "no ends of documents" if shard.ends_region is None else "ends of documents",
            f"the tokenizer {shard.tokenizer!r}" if shard.tokenizer else "",
        )
        for shard in shards
    ]
    for shard, description in zip(shards, descriptions, strict=True):
        for first, other in zip(descriptions[0], description, strict=True):
            if other != first:
                raise ValueError(
                    f"{shards[0].path.name} and {shard.path.name} in {shard.path.parent} do not belong together: one has "
                    f"{first or 'no named tokenizer'}, the other {other or 'no named tokenizer'}. Keep shards of one kind in a folder of their own"
                )


def shard_of(path: Path, dtype: str | None) -> TokenShard:
    """Open one file.

    Args:
        dtype: of a raw file, the dtype of its tokens; of others it is checked.

    Raises:
        FileNotFoundError: there is no file.
        ValueError, TypeError: it is incomplete, or no file of tokens.
    """
    if not path.is_file():
        part = path.with_name(path.name + PART)
        hint = f": {part.name} is there, whose writer is at work or was interrupted; {_ADVICE}" if part.exists() else ""
        raise FileNotFoundError(f"{path} does not exist{hint}")
    shard = _OPENED_BY.get(path.suffix, _raw)(path, dtype)
    if dtype is not None and numpy.dtype(shard.tokens_region.dtype) != numpy.dtype(dtype):
        raise TypeError(f"{path} has tokens of {shard.tokens_region.dtype}, and dtype={dtype!r} was asked for")
    if not shard.tokens_region.size:
        raise ValueError(f"{path} has no tokens")
    return shard


def _check_dtype(path: Path, name: str) -> str:
    """Return the name of a dtype that tokens can have.

    Raises:
        TypeError: they cannot.
    """
    if name.lstrip("<>=|") not in DTYPES.values():
        raise TypeError(
            f"{path} has tokens of {name}: tokens are whole numbers, of {', '.join(DTYPES.values())}; {_ADVICE}"
        )
    return name


def _safetensors(path: Path, dtype: str | None) -> TokenShard:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= _MOST_HEADER_BYTES or header_bytes > size:
            raise ValueError(f"{path} is not a safetensors file, or is truncated: it has {size:,} bytes; {_ADVICE}")
        try:
            header = json.loads(file.read(header_bytes))
            regions = {name: entry for name, entry in header.items() if name != "__metadata__"}
            spans = {name: tuple(map(int, entry["data_offsets"])) for name, entry in regions.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read; {_ADVICE}") from None
    if "tokens" not in regions:
        raise ValueError(
            f"{path} has the tensors {', '.join(regions) or 'none'}, and no 'tokens': it is not a file of tokens"
        )
    expected = 8 + header_bytes + max(end for _, end in spans.values())
    if size != expected:
        raise ValueError(
            f"{path} has {size:,} bytes, and its header describes {expected:,}: it is truncated or damaged; copy it again, or {_ADVICE}"
        )

    def region(name: str) -> Region:
        entry, (begin, end) = regions[name], spans[name]
        kind = _check_dtype(path, DTYPES.get(entry["dtype"], str(entry["dtype"])))
        if len(entry["shape"]) != 1 or entry["shape"][0] * numpy.dtype(kind).itemsize != end - begin:
            raise ValueError(
                f"{path}: {name!r} has the shape {entry['shape']}: a file of tokens has one dimension; {_ADVICE}"
            )
        return Region(8 + header_bytes + begin, kind, entry["shape"][0])

    metadata = header.get("__metadata__") or {}
    return TokenShard(
        path, region("tokens"), region("ends") if "ends" in regions else None, metadata.get("tokenizer", "")
    )


def _npy(path: Path, dtype: str | None) -> TokenShard:
    try:
        mapped = numpy.load(path, mmap_mode="r", allow_pickle=False)
        offset = mapped.offset
    except (ValueError, OSError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} is not a .npy file with numbers, or is truncated: {error}; {_ADVICE}") from None
    kind = _check_dtype(path, mapped.dtype.name)
    if mapped.ndim != 1:
        raise ValueError(
            f"{path} has the shape {list(mapped.shape)}: a file of tokens has one dimension, numpy.save(path, tokens.reshape(-1))"
        )
    # With the order of its bytes, which the name leaves out.
    return TokenShard(path, Region(offset, kind if mapped.dtype.isnative else mapped.dtype.str, len(mapped)), None)


def _raw(path: Path, dtype: str | None) -> TokenShard:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(12)
    magic, version, count = struct.unpack("<iii", start) if len(start) == 12 else (0, 0, 0)
    offset, kind = 0, _HEADERS_OF_RAW.get((magic, version))
    if kind is not None:
        offset, expected = _BYTES_OF_RAW_HEADER, _BYTES_OF_RAW_HEADER + count * numpy.dtype(kind).itemsize
        if size != expected:
            raise ValueError(
                f"{path} has {size:,} bytes, and its header describes {expected:,}: it is truncated or damaged; copy it again"
            )
    elif dtype is None:
        raise ValueError(
            f"{path} has no header that says how its tokens are stored: give dtype=, for nanoGPT's files dtype='uint16'"
        )
    else:
        kind = _check_dtype(path, numpy.dtype(dtype).name)
    if path.with_suffix(".idx").is_file():
        raise ValueError(
            f"{path} stands beside {path.stem}.idx, as Megatron's files do, whose documents are read in the order of that index: write the documents "
            "with TokenFile.write"
        )
    width = numpy.dtype(kind).itemsize
    if (size - offset) % width:
        raise ValueError(
            f"{path} has {size:,} bytes, which is not a whole number of {kind}: it is truncated, or dtype= is another one"
        )
    return TokenShard(path, Region(offset, kind, (size - offset) // width), None)


_OPENED_BY = {SAFETENSORS: _safetensors, NPY: _npy}
