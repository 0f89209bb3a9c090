"""Tensors in safetensors files: whole ones, and shards of tensors that several ranks hold together.

The files are those of ``torch.distributed.checkpoint``'s Hugging Face storage: each says in its metadata where in the whole tensors
its shards are, so any number of ranks reads what any other number wrote, and ``safetensors`` alone reads what one rank wrote.

Torch is imported where tensors are used: ``fit checkpoint list`` reads none.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.files import CHUNK, DamagedCheckpoint, Record, fill, open_file, parse_json, write_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMATS: dict[str, str] = dict(
    (
        *(
            ("float64", "F64"),
            ("float32", "F32"),
            ("float16", "F16"),
            ("bfloat16", "BF16"),
            ("complex64", "C64"),
            ("bool", "BOOL"),
        ),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
        *(
            ("float8_e4m3fn", "F8_E4M3"),
            ("float8_e5m2", "F8_E5M2"),
            ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
            ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
            ("float8_e8m0fnu", "F8_E8M0"),
        ),
    )
)
"""The dtypes of safetensors by torch's names, and its own names for them."""
_READ = {
    short: (name, 1 if short == "BOOL" else int("".join(filter(str.isdigit, short.partition("_")[0]))) // 8)
    for name, short in FORMATS.items()
}
"""torch's names of the dtypes, and bytes of an element, by safetensors' names."""
_JOINED = {"float64", "float32", "float16", "complex64", "bool", "int64", "int32", "int16", "int8", "uint8"}
"""The dtypes that both ``torch.cat`` and NumPy have."""
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors reads no longer one."""
_MOST = 1 << 63
"""torch counts elements in signed 64-bit integers."""
_SHARDING = "DCP_SHARDING_INFO"
"""Where a file's metadata says at which offsets its shards start."""
COMPLEX = "@complex128"
"""The suffix of names of complex128 tensors, which safetensors does not support: they are stored as pairs of F64, with one more dim."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint's files that has not been read."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def storable(tensor: Any) -> bool:
    """Whether safetensors can hold it: a dense tensor with memory, of a supported dtype."""
    import torch

    return (
        isinstance(tensor, torch.Tensor)
        and known_format(tensor.dtype)
        and not tensor.is_meta
        and tensor.layout == torch.strided
    )


def known_format(dtype: torch.dtype) -> bool:
    """Whether a file can hold tensors of this type."""
    return (name := _name(dtype)) in FORMATS or name == "complex128"


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> Record:
    """Write one file and wait until it is on the disk. Tensors of a device are copied to the host one at a time.

    Torch's writer first assembles the whole file in memory while it holds the GIL; this one writes directly from the tensors' memory,
    computes the checksum on the way, and lets other threads run.

    Args:
        offsets: where in the whole tensor each one starts; by default they are whole.
    """
    import torch

    parts = {name: (tensor, list(offsets[name]) if offsets else []) for name, tensor in tensors.items()}
    for name, (tensor, begin) in list(parts.items()):
        if tensor.dtype == torch.complex128:
            del parts[name]
            parts[name + COMPLEX] = torch.view_as_real(tensor.resolve_conj()), [*begin, 0]
    metadata = {"format": "pt"}
    if offsets is not None:
        where = {name: {"saved_offsets": begin} for name, (_, begin) in parts.items()}
        metadata |= {"DCP_VERSION": "1.0", _SHARDING: json.dumps(where)}
    return write_file(path, serialize_tensors({name: tensor for name, (tensor, _) in parts.items()}, metadata))


def serialize_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the content of a safetensors file in parts: its header, then the bytes of each tensor.

    Tensors of a device are copied to the host one at a time; contiguous ones of the host are not copied.

    Args:
        tensors: dense ones with memory, by name.
        metadata: texts for the file's header.

    Raises:
        TypeError: safetensors has no name for a tensor's dtype.
        ValueError: a tensor has a name that a file cannot have.
    """
    import torch

    if "__metadata__" in tensors:
        raise ValueError(
            "a tensor has the name '__metadata__', which safetensors needs for itself: choose another name"
        )
    # Large elements first: every tensor then starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    # Pieces of text, not one nested dict: 100,000 small objects would start the garbage collector.
    entries = ['"__metadata__":{' + ",".join([f"{_json(key)}:{_json(text)}" for key, text in metadata.items()]) + "}"]
    low = 0
    for name, tensor in ordered:
        if (dtype := _name(tensor.dtype)) not in FORMATS:
            raise TypeError(f"tensor {name!r} has the dtype {dtype}, which safetensors cannot hold: convert it")
        high = low + tensor.nbytes
        entries.append(
            f'{_json(name)}:{{"dtype":"{FORMATS[dtype]}","shape":{[*tensor.shape]},"data_offsets":[{low},{high}]}}'
        )
        low = high
    try:
        header = f"{{{','.join(entries)}}}".encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a tensor has a name with a lone surrogate, which no file can hold: {error}") from error
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    if len(ordered) < _FEW:
        yield from (_bytes(tensor) for _, tensor in ordered)
        return
    for _, run in itertools.groupby((tensor for _, tensor in ordered), _joined_dtype):
        alike = list(run)
        if _joined_dtype(alike[0]) is None:
            yield from map(_bytes, alike)
            continue
        for first in range(0, len(alike), _AT_ONCE):
            with torch.no_grad():
                joined = torch.cat([tensor.reshape(-1) for tensor in alike[first : first + _AT_ONCE]])
            yield joined.numpy().view("u1")


_FEW, _AT_ONCE, _SMALL = 4, 256, 1 << 14
"""Limits of joined writes: the fewest and the most tensors that are written together, and the bytes of the largest of them. To copy small
tensors costs less than a write of each."""


def _joined_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of a small plain tensor of the host, which is copied together with its neighbours of that dtype; ``None`` for others."""
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.nbytes <= _SMALL
    return tensor.dtype if plain and _name(tensor.dtype) in _JOINED else None


_json = json.JSONEncoder(ensure_ascii=False).encode


def _bytes(tensor: Tensor) -> Any:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass (torchao's weights that FSDP gathers in fp8) whose memory NumPy cannot see: as bytes it is a plain tensor.
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    elif (dtype := _name(tensor.dtype)) == "bfloat16" or dtype.startswith("float8"):  # NumPy has no such numbers
        tensor = tensor.view(torch.int16 if dtype == "bfloat16" else torch.int8)
    return tensor.numpy(force=True).ravel().view("u1")


class TensorFiles:
    """The tensors of some safetensors files, and reading of any part of them.

    Each file is opened without blocking, checked to be a regular one, and read rather than mapped, so whatever another program does to the files
    meanwhile is an error. safetensors and torch would wait forever at a pipe in a file's place, and a file that is cut short while it is mapped
    ends the process.

    Args:
        directory: the folder of the files; errors name it.
        files: by default all of the folder's.
        prefix: only tensors whose names begin with it count, and their names are without it.

    Raises:
        DamagedCheckpoint: a file is not a safetensors file, or shards of a tensor are missing.
    """

    def __init__(self, directory: Path, files: Iterable[Path] | None = None, prefix: str = "") -> None:
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        """The tensors by name."""
        self.metadata: dict[Path, dict[str, str]] = {}
        """The texts in each file's header."""
        self._parts: dict[str, list[_Part]] = {}
        for path in sorted(directory.glob("*.safetensors")) if files is None else files:
            self.metadata[path], stored = _read_header(path)
            for name, part in stored.items():
                if name.startswith(prefix):
                    self._parts.setdefault(name.removeprefix(prefix), []).append(part)
        for name, parts in self._parts.items():
            tensor = _tensor_of_parts(name, parts)
            if isinstance(tensor, str):
                raise DamagedCheckpoint(f"{directory}: parts of {name!r} {tensor}")
            self.stored[tensor.name] = tensor

    def parts(self) -> dict[str, int]:
        """The number of shards of each tensor in the files."""
        return {name.removesuffix(COMPLEX): len(parts) for name, parts in self._parts.items()}

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, whole ones or this rank's shards (``DTensor``), on any device. Not a collective.

        Args:
            targets: the tensors to fill, by their names in the files.

        Raises:
            ValueError: a name does not exist, or has another shape.
            DamagedCheckpoint: a file is not the one whose header was read, or has become shorter.
        """
        import torch

        for name, target in targets.items():
            stored = self.stored.get(name)
            if stored is None:
                raise ValueError(f"{self.directory}: there is no tensor {name!r}")
            if stored.shape != target.shape:
                raise ValueError(
                    f"{self.directory}: {name!r} has shape {list(stored.shape)}, and {list(target.shape)} was requested"
                )
        self._fill((name, *_local(target.detach())) for name, target in targets.items())
        for target in targets.values():  # written through views and aliases: bump the version of the tensor itself
            torch.autograd.graph.increment_version(target)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """The rows ``first`` up to ``last`` of the tensor ``name``, on the CPU; others are not read.

        Raises:
            DamagedCheckpoint: as :meth:`read_into`.
        """
        import torch

        stored = self.stored[name]
        values = torch.empty((last - first, *stored.shape[1:]), dtype=stored.dtype)
        self._fill([(name, (first, *(0 for _ in stored.shape[1:])), values)])
        return values

    def whole_tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read the tensors ``names``, by default all, in full and to the CPU."""
        import torch

        chosen = self.stored if names is None else {name: self.stored[name] for name in names}
        values = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in chosen.items()}
        self.read_into(values)
        return values

    def _fill(self, boxes: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Fill tensors, each with the values of a named one from an offset on."""
        import torch

        pieces: dict[_File, list[tuple[_Part, Box, Tensor]]] = {}
        for name, begin, target in boxes:
            if self.stored[name].dtype == torch.complex128:
                name, begin, target = name + COMPLEX, (*begin, 0), torch.view_as_real(target)
            parts = self._parts[name]
            if len(parts) == 1 and parts[0].shape == target.shape:  # all of it, in one piece
                if target.numel():
                    pieces.setdefault(parts[0].file, []).append((parts[0], (parts[0].begin, parts[0].shape), target))
                continue
            for part in parts:
                if (box := _common((tuple(begin), target.shape), (part.begin, part.shape))) is not None:
                    low, size = box
                    slices = tuple(slice(at - b, at - b + n) for at, b, n in zip(low, begin, size, strict=True))
                    inner = tuple(at - b for at, b in zip(low, part.begin, strict=True)), size
                    pieces.setdefault(part.file, []).append((part, inner, target[slices]))
        for file, reads in pieces.items():
            with file.open() as descriptor:
                for part, box, target in sorted(reads, key=lambda piece: piece[0].place):
                    part.read_into(descriptor, box, target)


def check_header(path: Path) -> None:
    """Check that a file is a safetensors file whose tensors lie in it, without reading them.

    Raises:
        DamagedCheckpoint: it is not.
    """
    _read_header(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU."""
    return TensorFiles(path, [path]).whole_tensors()


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard starts in its tensor, and its shape."""


@dataclass(frozen=True)
class _File:
    """A file whose header was read."""

    path: Path
    identity: tuple[int, ...]

    @contextmanager
    def open(self) -> Iterator[int]:
        """The file's descriptor.

        Raises:
            DamagedCheckpoint: there is another file now, or this one was changed.
        """
        descriptor = open_file(self.path)
        try:
            if _identity(descriptor) != self.identity:
                raise DamagedCheckpoint(f"{self.path} was replaced or changed while it was read")
            yield descriptor
        finally:
            os.close(descriptor)


def _common(first: Box, second: Box) -> Box | None:
    """The elements that two boxes of a tensor have in common, if there are any."""
    low = tuple(max(pair) for pair in zip(first[0], second[0], strict=True))
    sides = zip(*first, *second, low, strict=True)
    size = tuple(min(b + n, o + m) - at for b, n, o, m, at in sides)
    return (low, size) if all(n > 0 for n in size) else None


def _identity(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Part:
    """A tensor in a file, or a part of one."""

    file: _File
    place: int
    """Where its bytes start in the file."""
    dtype: str
    """torch's name."""
    begin: tuple[int, ...]
    """Where in the whole tensor it starts."""
    shape: tuple[int, ...]

    def read_into(self, descriptor: int, box: Box, target: Tensor) -> None:
        """Fill ``target`` with a box of this part."""
        import torch

        dtype = getattr(torch, self.dtype)
        (begin, size), shape = box, self.shape
        if not shape:
            (begin, size), shape, target = ((0,), (1,)), (1,), target.view(1)
        row = math.prod(shape[1:]) * dtype.itemsize
        place = self.place + begin[0] * row
        plain = type(target) is torch.Tensor and target.is_cpu and not target.is_neg() and not target.is_conj()
        if plain and target.dtype == dtype and size[1:] == shape[1:] and target.is_contiguous():
            self._read(descriptor, target, place)
            return
        inner = tuple(slice(b, b + n) for b, n in zip(begin[1:], size[1:], strict=True))
        row_count = max(1, min(size[0], CHUNK // row))
        rows = torch.empty((row_count, *shape[1:]), dtype=dtype)
        for first in range(0, size[0], row_count):
            some = rows[: min(row_count, size[0] - first)]
            self._read(descriptor, some, place + first * row)
            target[first : first + row_count].copy_(some[:, *inner])

    def _read(self, descriptor: int, target: Tensor, place: int) -> None:
        """Fill a contiguous tensor of the CPU with the file's bytes from ``place`` on."""
        import torch

        values: Any = target.reshape(-1).view(torch.uint8).numpy()
        fill(self.file.path, descriptor, memoryview(values), place)


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, _Part]]:
    """The metadata of a file, and its tensors and parts of tensors. What is wrong with it is found before anything is allocated."""

    def damaged(reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{path}: a safetensors file cannot be read: {reason}")

    with os.fdopen(open_file(path), "rb") as stream:
        file = _File(path, _identity(stream.fileno()))
        size = os.fstat(stream.fileno()).st_size - 8
        length = int.from_bytes(stream.read(8), "little") if size > 0 else 0
        if not 0 < length <= min(size, _LONGEST_HEADER):
            raise damaged("its header does not fit its size")
        text = stream.read(length)
    try:
        header = parse_json(path, text)
        facts = header.pop("__metadata__", {})
        begins = parse_json(path, facts[_SHARDING].encode()) if _SHARDING in facts else None
    except (DamagedCheckpoint, AttributeError, TypeError) as error:
        raise damaged(f"its header is not what safetensors writes: {error}") from error
    parts, ranges = {}, []
    for name, entry in header.items():
        try:
            (dtype, width), shape, (low, high) = _READ[entry["dtype"]], entry["shape"], entry["data_offsets"]
            begin = [0] * len(shape) if begins is None else begins[name]["saved_offsets"]
            numbers = [*begin, *shape, low, high]
            valid = len(begin) == len(shape) and all(type(n) is int and 0 <= n < _MOST for n in numbers)
            valid = valid and high - low == math.prod(shape) * width
        except (LookupError, TypeError, ValueError):
            valid = False
        if not valid:
            raise damaged(f"its header describes {name!r} as {str(entry)[:200]}")
        parts[name] = _Part(file, 8 + length + low, dtype, tuple(begin), tuple(shape))
        ranges.append((low, high))
    ranges = [(0, 0), *sorted(ranges), (size - length, size - length)]
    if any(lower[1] != upper[0] for lower, upper in itertools.pairwise(ranges)):
        raise damaged("its header does not fit its size")
    return facts, parts


def _tensor_of_parts(name: str, parts: Sequence[_Part]) -> Stored | str:
    """The tensor that parts make, or what is wrong with them."""
    import torch

    first = parts[0]
    if any(part.dtype != first.dtype or len(part.shape) != len(first.shape) for part in parts):
        return "have several dtypes or numbers of dims"
    ends = [[b + n for b, n in zip(part.begin, part.shape, strict=True)] for part in parts]
    shape = [max(column) for column in zip(*ends, strict=True)]
    if math.prod(max(1, n) for n in shape) >= _MOST:
        return "lie too far out"
    if wrong := _coverage_error(shape, [(part.begin, part.shape) for part in parts]):
        return wrong
    dtype: torch.dtype = getattr(torch, first.dtype)
    if not name.endswith(COMPLEX):
        return Stored(name, torch.Size(shape), dtype)
    if dtype != torch.float64 or shape[-1:] != [2]:
        return "are not pairs of F64"
    return Stored(name.removesuffix(COMPLEX), torch.Size(shape[:-1]), torch.complex128)


def _coverage_error(shape: Sequence[int], parts: Sequence[Box]) -> str:
    """The end of an error about shards that do not cover each element of a tensor of ``shape`` once; empty if they do."""
    if any(
        len(begin) != len(shape) or any(b < 0 or b + n > end for b, n, end in zip(begin, size, shape, strict=True))
        for begin, size in parts
    ):
        return "lie outside of it"
    if sum(math.prod(size) for _, size in parts) != math.prod(shape):
        return "are missing"
    if len(parts) == 1 or not math.prod(shape):
        return ""
    # Along the dim with the most distinct offsets, few shards overlap.
    dim = max(range(len(shape)), key=lambda d: len({begin[d] for begin, _ in parts}))
    beside: list[Box] = []
    for begin, size in sorted(parts, key=lambda part: part[0][dim]):
        beside = [(b, s) for b, s in beside if b[dim] + s[dim] > begin[dim]]
        for neighbour, extent in beside:
            if all(b < o + e and o < b + n for b, n, o, e in zip(begin, size, neighbour, extent, strict=True)):
                return "overlap, and others are missing"
        beside.append((begin, size))
    return ""


def is_cut(tensor: Tensor) -> bool:
    """Whether a tensor is sharded over ranks. (Never, if nobody has imported ``DTensor``.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _local(tensor: Tensor) -> tuple[Sequence[int], Tensor]:
    """This rank's part of a tensor: where it starts, and its memory."""
    if not is_cut(tensor):
        return (0,) * tensor.ndim, tensor
    shard: Any = tensor
    (chunk,) = shard.__create_chunk_list__()
    return chunk.offsets, shard.to_local()
