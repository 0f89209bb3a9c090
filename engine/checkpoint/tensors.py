"""Tensors in safetensors files: whole ones, and shards of tensors that several ranks hold together.

The files are those of ``torch.distributed.checkpoint``'s Hugging Face storage: each says in its metadata where in the whole tensors
its shards are, so any number of ranks reads what any other number wrote, and ``safetensors`` alone reads what one rank wrote.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint, Record, write_file

FORMATS: dict[torch.dtype, str] = {
    getattr(torch, name): short
    for name, short in (
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
        ),
    )
}
"""The dtypes of safetensors, and its names for them."""
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
    return (
        isinstance(tensor, Tensor)
        and known_format(tensor.dtype)
        and not tensor.is_meta
        and tensor.layout == torch.strided
    )


def known_format(dtype: torch.dtype) -> bool:
    """Whether a file can hold tensors of this type."""
    return dtype in FORMATS or dtype == torch.complex128


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> Record:
    """Write one file and wait until it is on the disk. Tensors of a device are copied to the host one at a time.

    torch's and safetensors' own writers first assemble the whole file in memory while they hold the GIL; this one writes directly
    from the tensors' memory, computes the checksum on the way, and lets other threads run.

    Args:
        offsets: where in the whole tensor each one starts; by default they are whole.
    """
    parts = {name: (tensor, list(offsets[name]) if offsets else []) for name, tensor in tensors.items()}
    for name, (tensor, begin) in list(parts.items()):
        if tensor.dtype == torch.complex128:
            del parts[name]
            parts[name + COMPLEX] = torch.view_as_real(tensor.resolve_conj()), [*begin, 0]
    # Large elements first: every tensor then starts at a multiple of its element size.
    ordered = sorted(
        ((name, tensor) for name, (tensor, _) in parts.items()), key=lambda item: (-item[1].element_size(), item[0])
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        where = {name: {"saved_offsets": parts[name][1]} for name, _ in ordered}
        header["__metadata__"] |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where)}
    low = 0
    for name, tensor in ordered:
        high = low + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [low, high]}
        low = high
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(
        path,
        (
            part
            for parts in ([len(text).to_bytes(8, "little"), text], map(_bytes, (t for _, t in ordered)))
            for part in parts
        ),
    )


def _bytes(tensor: Tensor) -> Any:
    here = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy() if here.numel() else b""


class TensorFiles:
    """The tensors of one directory of a checkpoint, and reading of any part of them.

    Raises:
        DamagedCheckpoint: a file is not a safetensors file, or shards of a tensor are missing.
    """

    def __init__(self, directory: Path, any_files: bool = True) -> None:
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        """The tensors by name."""
        self._entries: dict[str, Any] = {}
        if not any_files:
            return
        # Imported here: it takes 0.7 s, and most processes do not read.
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        reader: Any = HuggingFaceStorageReader(str(directory))
        metadata = _checked(directory, reader.read_metadata)
        vars(reader)["read_metadata"] = lambda *_, **__: metadata  # the headers are read once
        self._reader = reader
        self._entries = metadata.state_dict_metadata
        _checked(directory, self._list)

    def _list(self) -> None:
        """Fill :attr:`stored`."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        for name, entry in self._entries.items():
            assert isinstance(
                entry, TensorStorageMetadata
            )  # the other kind is pickled, and never written by this library
            if bad := _untiled(entry.size, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]):
                raise DamagedCheckpoint(f"{self.directory}: parts of {name!r} {bad}")
            if name.endswith(COMPLEX):
                name = name.removesuffix(COMPLEX)
                self.stored[name] = Stored(name, entry.size[:-1], torch.complex128)
            else:
                self.stored[name] = Stored(name, entry.size, entry.properties.dtype)

    def parts(self) -> dict[str, int]:
        """The number of shards of each tensor in the files."""
        return {name.removesuffix(COMPLEX): len(entry.chunks) for name, entry in self._entries.items()}

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors by name, whole ones or this rank's shards (``DTensor``), on any device. Not a collective.

        Raises:
            ValueError: a name does not exist, or has another shape.
        """
        for name, target in targets.items():
            known = self.stored.get(name)
            if known is None:
                raise ValueError(f"{self.directory}: there is no tensor {name!r}")
            if known.shape != target.shape:
                raise ValueError(
                    f"{self.directory}: {name!r} has shape {list(known.shape)}, and {list(target.shape)} was requested"
                )
        if targets:
            from torch.distributed.checkpoint import DefaultLoadPlanner, load

            state = {}
            for name, target in targets.items():
                if self.stored[name].dtype == torch.complex128:
                    state[name + COMPLEX] = _pairs(target.detach())
                else:
                    state[name] = target.detach()
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            with torch.no_grad(), warnings.catch_warnings():
                # Every rank reads for itself on purpose.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
                _checked(
                    self.directory, lambda: load(state, storage_reader=self._reader, planner=planner, no_dist=True)
                )
            for target in targets.values():  # written through views and aliases: bump the version of the tensor itself
                torch.autograd.graph.increment_version(target)

    def whole(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Whole tensors on the CPU; all of them by default."""
        chosen = self.stored if names is None else {name: self.stored[name] for name in names}
        found = {name: torch.empty(known.shape, dtype=known.dtype) for name, known in chosen.items()}
        self.read_into(found)
        return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = _checked(path, lambda: load_file(path))
    return {
        name.removesuffix(COMPLEX): torch.view_as_complex(t) if name.endswith(COMPLEX) else t
        for name, t in found.items()
    }


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard starts in its tensor, and its shape."""


def _untiled(shape: Sequence[int], parts: Sequence[Box]) -> str:
    """What is wrong with shards that do not cover each element of a tensor of ``shape`` once; empty if nothing."""
    if any(
        len(begin) != len(shape) or any(b < 0 or b + n > most for b, n, most in zip(begin, size, shape, strict=True))
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
        for other, extent in beside:
            if all(b < o + e and o < b + n for b, n, o, e in zip(begin, size, other, extent, strict=True)):
                return "overlap, and others are missing"
        beside.append((begin, size))
    return ""


def _pairs(tensor: Any) -> Tensor:
    """A complex tensor's memory as pairs of real numbers, also of this rank's shard."""
    if type(tensor) is Tensor:
        return torch.view_as_real(tensor)
    local = torch.view_as_real(tensor.to_local())
    stride = (*(2 * step for step in tensor.stride()), 1)
    made: Tensor = type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size((*tensor.shape, 2)),
        stride=stride,
    )
    return made


def _checked(directory: Path, read: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return read()
    except DamagedCheckpoint:
        raise
    except (
        SafetensorError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
        AssertionError,
    ) as error:
        raise DamagedCheckpoint(
            f"{directory}: a safetensors file cannot be read: {type(error).__name__}: {error}"
        ) from error
