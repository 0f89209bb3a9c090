"""Read and write tensors in safetensors files: whole tensors, and shards of tensors that are distributed over ranks.

The format is that of ``torch.distributed.checkpoint``'s Hugging Face storage: a file's metadata says where in the whole tensors
its shards are. So any number of ranks can read what any other number wrote, and ``safetensors`` alone can read what one rank wrote.

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
"""The names of dtypes in safetensors files, by torch's names."""
_READ = {
    short: (name, 1 if short == "BOOL" else int("".join(filter(str.isdigit, short.partition("_")[0]))) // 8)
    for name, short in FORMATS.items()
}
"""Torch's name and the bytes per element of each dtype, by its name in safetensors files."""
_CONCATENATED_DTYPES = {
    "float64",
    "float32",
    "float16",
    "complex64",
    "bool",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
}
"""The dtypes that both ``torch.cat`` and NumPy support."""
_MAX_HEADER = 100_000_000
"""The maximum bytes of a header that safetensors reads."""
_MAX_ELEMENTS = 1 << 63
"""Torch counts elements in signed 64-bit integers."""
_SHARDING = "DCP_SHARDING_INFO"
"""The entry of a file's metadata with the offsets at which its shards start."""
COMPLEX = "@complex128"
"""The suffix of names of complex128 tensors. Safetensors does not support them: they are stored as F64 with a last dim of size 2."""


@dataclass(frozen=True)
class Stored:
    """The description of a tensor in a checkpoint's files, whose values are not read."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def storable(tensor: Any) -> bool:
    """Whether ``tensor`` can be stored in a safetensors file: a dense tensor with data, of a supported dtype, or a
    ``DTensor``. Other classes, which are made of several tensors, cannot be stored."""
    import torch

    return (
        isinstance(tensor, torch.Tensor)
        and known_format(tensor.dtype)
        and not tensor.is_meta
        and tensor.layout == torch.strided
        and (is_dtensor(tensor) or not hasattr(tensor, "__tensor_flatten__"))
    )


def known_format(dtype: torch.dtype) -> bool:
    """Whether files can hold tensors of this dtype."""
    return (name := _name(dtype)) in FORMATS or name == "complex128"


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> Record:
    """Write one file and wait until it is on the disk. Tensors on a device are copied to the host one at a time.

    Torch's writer first assembles the whole file in memory while it holds the GIL; this one writes directly from the tensors' memory,
    computes the checksum on the way, and lets other threads run.

    Args:
        offsets: where in its whole tensor each shard starts; by default the tensors are whole.
    """
    import torch

    parts = {name: (tensor, list(offsets[name]) if offsets else []) for name, tensor in tensors.items()}
    for name, (tensor, begin) in list(parts.items()):
        if tensor.dtype == torch.complex128:
            del parts[name]
            parts[name + COMPLEX] = torch.view_as_real(tensor.resolve_conj()), [*begin, 0]
    metadata = {"format": "pt"}
    if offsets is not None:
        sharding = {name: {"saved_offsets": begin} for name, (_, begin) in parts.items()}
        metadata |= {"DCP_VERSION": "1.0", _SHARDING: json.dumps(sharding)}
    return write_file(path, serialize_tensors({name: tensor for name, (tensor, _) in parts.items()}, metadata))


def serialize_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the content of a safetensors file in parts: its header, then the bytes of each tensor.

    Tensors on a device are copied to the host one at a time; contiguous host tensors are not copied, except for small ones.

    Args:
        tensors: dense tensors with data, by name.
        metadata: texts for the file's header.

    Raises:
        TypeError: safetensors has no name for a tensor's dtype.
        ValueError: a tensor has a name that a safetensors file cannot contain.
    """
    import torch

    if "__metadata__" in tensors:
        raise ValueError(
            "a tensor has the name '__metadata__', which safetensors needs for itself: choose another name"
        )
    # Sorted by element size, largest first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    # Texts rather than one nested dict, whose 100,000 small objects would start the garbage collector.
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
    if len(ordered) < _MIN_CONCATENATED:
        yield from (_bytes(tensor) for _, tensor in ordered)
        return
    for _, run in itertools.groupby((tensor for _, tensor in ordered), _concatenated_dtype):
        same_dtype = list(run)
        if _concatenated_dtype(same_dtype[0]) is None:
            yield from map(_bytes, same_dtype)
            continue
        for first in range(0, len(same_dtype), _MAX_CONCATENATED):
            with torch.no_grad():
                joined = torch.cat([tensor.reshape(-1) for tensor in same_dtype[first : first + _MAX_CONCATENATED]])
            yield joined.numpy().view("u1")


_MIN_CONCATENATED, _MAX_CONCATENATED, _MAX_SMALL_BYTES = 4, 256, 1 << 14
"""Small tensors are concatenated before they are written, since a copy costs less than a write: the minimum number of tensors in a file for that,
the maximum number in one write, and the maximum bytes of a small tensor."""


def _concatenated_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of a small plain host tensor, which is concatenated with neighbours of the same dtype; ``None`` for any other tensor."""
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.nbytes <= _MAX_SMALL_BYTES
    return tensor.dtype if plain and _name(tensor.dtype) in _CONCATENATED_DTYPES else None


_json = json.JSONEncoder(ensure_ascii=False).encode


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes as a NumPy array, without a copy if it is a contiguous host tensor."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # NumPy cannot access the memory of a subclass (torchao's weights that FSDP gathers in fp8); viewed as bytes it is a plain tensor.
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    elif (dtype := _name(tensor.dtype)) == "bfloat16" or dtype.startswith("float8"):  # NumPy lacks these dtypes
        tensor = tensor.view(torch.int16 if dtype == "bfloat16" else torch.int8)
    return tensor.numpy(force=True).ravel().view("u1")


class TensorFiles:
    """The tensors in a set of safetensors files, of which any part can be read.

    Each file is opened without blocking, must be a regular one, and is read rather than mapped, so that changes by other programs cause errors.
    safetensors and torch would wait forever for a pipe in a file's place, and truncating a mapped file kills the process.

    Args:
        directory: the folder of the files, which errors name.
        files: by default all safetensors files in the folder.
        prefix: only tensors with this prefix are included; it is stripped from their names.

    Raises:
        DamagedCheckpoint: a file is not a safetensors file, or shards of a tensor are missing.
    """

    def __init__(self, directory: Path, files: Iterable[Path] | None = None, prefix: str = "") -> None:
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        """The descriptions of the tensors, by name."""
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
        """Fill tensors on any device, whole ones or this rank's shards (``DTensor``), from the files. Not a collective.

        Args:
            targets: the tensors to fill, by their names in the files.

        Raises:
            ValueError: the files have no tensor of a name, or one of another shape.
            DamagedCheckpoint: a file was replaced, changed or truncated since its header was read.
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
        self._fill((name, *_own_shard(target.detach())) for name, target in targets.items())
        for target in targets.values():  # filled through views and aliases, which do not increment its version counter
            torch.autograd.graph.increment_version(target)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Read only the rows from ``first`` up to ``last``, exclusive, of the tensor ``name``, to the CPU.

        Raises:
            DamagedCheckpoint: a file was replaced, changed or truncated since its header was read.
        """
        import torch

        stored = self.stored[name]
        values = torch.empty((last - first, *stored.shape[1:]), dtype=stored.dtype)
        self._fill([(name, (first, *(0 for _ in stored.shape[1:])), values)])
        return values

    def whole_tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read the whole tensors of these ``names``, by default all of them, to the CPU."""
        import torch

        chosen = self.stored if names is None else {name: self.stored[name] for name in names}
        values = {name: torch.empty(stored.shape, dtype=stored.dtype) for name, stored in chosen.items()}
        self.read_into(values)
        return values

    def _fill(self, boxes: Iterable[tuple[str, Sequence[int], Tensor]]) -> None:
        """Fill tensors. ``boxes``: for each target the name of the stored tensor, the offsets from which on it is read, and the target."""
        import torch

        pieces: dict[_File, list[tuple[_Part, Box, Tensor]]] = {}
        for name, begin, target in boxes:
            if self.stored[name].dtype == torch.complex128:
                name, begin, target = name + COMPLEX, (*begin, 0), torch.view_as_real(target)
            parts = self._parts[name]
            if len(parts) == 1 and parts[0].shape == target.shape:  # the whole tensor is in one file, and is read whole
                if target.numel():
                    pieces.setdefault(parts[0].file, []).append((parts[0], (parts[0].begin, parts[0].shape), target))
                continue
            for part in parts:
                if (box := _intersection((tuple(begin), target.shape), (part.begin, part.shape))) is not None:
                    low, size = box
                    slices = tuple(slice(at - b, at - b + n) for at, b, n in zip(low, begin, size, strict=True))
                    box_in_part = tuple(at - b for at, b in zip(low, part.begin, strict=True)), size
                    pieces.setdefault(part.file, []).append((part, box_in_part, target[slices]))
        for file, reads in pieces.items():
            with file.open() as descriptor:
                for part, box, target in sorted(reads, key=lambda piece: piece[0].file_offset):
                    part.read_into(descriptor, box, target)


def check_header(path: Path) -> None:
    """Check the header of a safetensors file against the size of the file; tensors are not read.

    Raises:
        DamagedCheckpoint: it is not such a file, or is damaged.
    """
    _read_header(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of one file to the CPU."""
    return TensorFiles(path, [path]).whole_tensors()


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard starts in its tensor, and its shape."""


@dataclass(frozen=True)
class _File:
    """A file whose header was read."""

    path: Path
    identity: tuple[int, ...]
    """Values that differ if the file is replaced or changed."""

    @contextmanager
    def open(self) -> Iterator[int]:
        """Open the file and yield its descriptor.

        Raises:
            DamagedCheckpoint: the file was replaced or changed.
        """
        descriptor = open_file(self.path)
        try:
            if _identity(descriptor) != self.identity:
                raise DamagedCheckpoint(f"{self.path} was replaced or changed while it was read")
            yield descriptor
        finally:
            os.close(descriptor)


def _intersection(first: Box, second: Box) -> Box | None:
    """The box of elements that two boxes of a tensor have in common; ``None`` if they have none."""
    low = tuple(max(pair) for pair in zip(first[0], second[0], strict=True))
    sides = zip(*first, *second, low, strict=True)
    size = tuple(min(b + n, o + m) - at for b, n, o, m, at in sides)
    return (low, size) if all(n > 0 for n in size) else None


def _identity(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Part:
    """A tensor, or a part of one, in a file."""

    file: _File
    file_offset: int
    """The offset of its bytes in the file."""
    dtype: str
    """Torch's name of the dtype."""
    begin: tuple[int, ...]
    """Where in the whole tensor the part starts."""
    shape: tuple[int, ...]

    def read_into(self, descriptor: int, box: Box, target: Tensor) -> None:
        """Fill ``target`` with a box of this part, whose offsets count from the part's start."""
        import torch

        dtype = getattr(torch, self.dtype)
        (begin, size), shape = box, self.shape
        if not shape:
            (begin, size), shape, target = ((0,), (1,)), (1,), target.view(1)
        row = math.prod(shape[1:]) * dtype.itemsize
        file_offset = self.file_offset + begin[0] * row
        plain = type(target) is torch.Tensor and target.is_cpu and not target.is_neg() and not target.is_conj()
        if plain and target.dtype == dtype and size[1:] == shape[1:] and target.is_contiguous():
            self._read(descriptor, target, file_offset)
            return
        columns = tuple(slice(b, b + n) for b, n in zip(begin[1:], size[1:], strict=True))
        row_count = max(1, min(size[0], CHUNK // row))
        rows = torch.empty((row_count, *shape[1:]), dtype=dtype)
        for row_number in range(0, size[0], row_count):
            filled = rows[: min(row_count, size[0] - row_number)]
            self._read(descriptor, filled, file_offset + row_number * row)
            target[row_number : row_number + row_count].copy_(filled[:, *columns])

    def _read(self, descriptor: int, target: Tensor, file_offset: int) -> None:
        """Fill a contiguous CPU tensor with the file's bytes from ``file_offset`` on."""
        import torch

        values: Any = target.reshape(-1).view(torch.uint8).numpy()
        fill(self.file.path, descriptor, memoryview(values), file_offset)


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, _Part]]:
    """Read a file's metadata, and its tensors and parts of tensors by name. Everything is checked before memory is allocated."""

    def damaged(reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{path}: a safetensors file cannot be read: {reason}")

    with os.fdopen(open_file(path), "rb") as stream:
        file = _File(path, _identity(stream.fileno()))
        size = os.fstat(stream.fileno()).st_size - 8
        length = int.from_bytes(stream.read(8), "little") if size > 0 else 0
        if not 0 < length <= min(size, _MAX_HEADER):
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
            valid = len(begin) == len(shape) and all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in numbers)
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
    """The tensor that these parts make up; if they do not make one, the end of an error message."""
    import torch

    first = parts[0]
    if any(part.dtype != first.dtype or len(part.shape) != len(first.shape) for part in parts):
        return "have several dtypes or numbers of dims"
    ends = [[b + n for b, n in zip(part.begin, part.shape, strict=True)] for part in parts]
    shape = [max(column) for column in zip(*ends, strict=True)]
    if math.prod(max(1, n) for n in shape) >= _MAX_ELEMENTS:
        return "have offsets that are too large"
    if wrong := _coverage_error(shape, [(part.begin, part.shape) for part in parts]):
        return wrong
    dtype: torch.dtype = getattr(torch, first.dtype)
    if not name.endswith(COMPLEX):
        return Stored(name, torch.Size(shape), dtype)
    if dtype != torch.float64 or shape[-1:] != [2]:
        return "are not pairs of F64"
    return Stored(name.removesuffix(COMPLEX), torch.Size(shape[:-1]), torch.complex128)


def _coverage_error(shape: Sequence[int], parts: Sequence[Box]) -> str:
    """The end of an error message if the shards do not cover each element of a tensor of ``shape`` exactly once; empty if they do."""
    if any(
        len(begin) != len(shape) or any(b < 0 or b + n > end for b, n, end in zip(begin, size, shape, strict=True))
        for begin, size in parts
    ):
        return "lie outside of it"
    if sum(math.prod(size) for _, size in parts) != math.prod(shape):
        return "are missing"
    if len(parts) == 1 or not math.prod(shape):
        return ""
    # A sweep along the dim with the most distinct offsets, where the fewest shards are open at once.
    dim = max(range(len(shape)), key=lambda d: len({begin[d] for begin, _ in parts}))
    open_parts: list[Box] = []
    for begin, size in sorted(parts, key=lambda part: part[0][dim]):
        open_parts = [(b, s) for b, s in open_parts if b[dim] + s[dim] > begin[dim]]
        for neighbour, extent in open_parts:
            if all(b < o + e and o < b + n for b, n, o, e in zip(begin, size, neighbour, extent, strict=True)):
                return "overlap, and others are missing"
        open_parts.append((begin, size))
    return ""


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, which is sharded over ranks. If its module was never imported, no tensor is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _own_shard(tensor: Tensor) -> tuple[Sequence[int], Tensor]:
    """This rank's shard of a tensor: its offsets in the whole tensor, and a tensor that shares its memory."""
    if not is_dtensor(tensor):
        return (0,) * tensor.ndim, tensor
    shard: Any = tensor
    (chunk,) = shard.__create_chunk_list__()
    return chunk.offsets, shard.to_local()
