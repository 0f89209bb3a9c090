"""Weights and states in other libraries' files, read without trusting them.

A pickle can name any function to be called while it is read. Here it is read by ``torch.load(weights_only=True)``, and the
index of a ``torch.distributed.checkpoint`` directory by an unpickler that knows only inert stand-ins for the classes of such an index.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint, inside, open_file
from engine.checkpoint.tensors import FORMATS, Stored

PICKLE = (
    "is a pickle, which can run code when it is opened: --trust-pickle (trust_pickle=True) reads it anyway, tensors and plain values "
    "only, through torch's weights_only"
)
METADATA = ".metadata"


class Tensors(Protocol):
    """Tensors by name that are read on demand."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...
    def whole(self, names: Sequence[str]) -> dict[str, Tensor]: ...


class InMemory:
    """Tensors in memory, or mapped from a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.stored = {name: Stored(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name].detach().cpu() for name in names}


class SafetensorsFile:
    """One ``.safetensors`` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        dtypes = {short: dtype for dtype, short in FORMATS.items()}

        def read(file: Any) -> dict[str, Stored]:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is not a dict
            return {name: Stored(name, torch.Size(s.get_shape()), dtypes[s.get_dtype()]) for name, s in found.items()}

        self.stored: dict[str, Stored] = self._open(read)

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._open(lambda file: {name: file.get_tensor(name) for name in names})
        return found

    def _open(self, read: Callable[[Any], Any]) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt") as file:
                return read(file)
        except (SafetensorError, KeyError) as error:
            raise DamagedCheckpoint(f"{self.path}: cannot be read as safetensors: {error}") from error


def load_pickle(file: Any, where: object, mmap: bool = False) -> Any:
    """Load a ``torch.save`` file that contains only tensors and plain values.

    Raises:
        ValueError: it contains anything else; the message names it.
        DamagedCheckpoint: it cannot be read.
    """
    try:
        with torch.serialization.safe_globals([PosixPath, WindowsPath]):  # common in hyperparameters, and harmless
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL " in text or "global" in text:
            name = text.partition("GLOBAL ")[2].split(" ")[0] or text.splitlines()[0]
            raise ValueError(
                f"{where} holds {name}, which is neither a tensor nor a plain value: it is not read. Save the file without it, or load it "
                "where it comes from and save its state_dict()"
            ) from error
        raise DamagedCheckpoint(f"{where} cannot be read: {text.splitlines()[0]}") from error
    except RuntimeError as error:
        if mmap and "mmap" in str(error):  # an old file format
            return load_pickle(file, where)
        raise DamagedCheckpoint(f"{where} cannot be read: {str(error).splitlines()[0]}") from error
    except OSError:
        raise
    except Exception as error:  # damaged files can fail in any way
        raise DamagedCheckpoint(f"{where} cannot be read: {type(error).__name__}: {error}") from error


class DistributedFiles:
    """A ``torch.distributed.checkpoint`` directory: ``.distcp`` files and a pickled index.

    Raises:
        ValueError: the index names a class that such an index does not contain.
        DamagedCheckpoint: it cannot be read, or parts are missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = _unpickled(directory / METADATA)
        try:
            self._read_index(index)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise DamagedCheckpoint(
                f"{directory / METADATA} is not a checkpoint's index: {type(error).__name__}: {error}"
            ) from error

    def _read_index(self, index: Any) -> None:
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """The path of each name in the saved tree."""
        self.stored: dict[str, Stored] = {}
        self.values: list[str] = []
        """Names of the entries that are not tensors."""
        self._places = {
            (str(key.fqn), tuple(getattr(key, "offset", None) or ())): (
                str(at.relative_path),
                int(at.offset),
                int(at.length),
            )
            for key, at in index.storage_data.items()
            if not getattr(at, "transform_descriptors", None)
        }
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for name, entry in index.state_dict_metadata.items():
            self.paths[name] = tuple((index.planner_data or {}).get(name, (name,)))
            if not hasattr(entry, "chunks"):
                self.values.append(name)
                continue
            dtype, size = entry.properties.dtype, torch.Size(entry.size)
            self._chunks[name] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            if (
                not isinstance(dtype, torch.dtype)
                or sum(prod(sizes) for _, sizes in self._chunks[name]) != size.numel()
            ):
                raise ValueError(f"parts of {name!r} are missing")
            self.stored[name] = Stored(name, size, dtype)

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in names:
            found[name] = torch.empty(self.stored[name].shape, dtype=self.stored[name].dtype)
            for offsets, sizes in self._chunks[name]:
                part = self._load(name, offsets)
                if not isinstance(part, Tensor) or tuple(part.shape) != sizes:
                    raise DamagedCheckpoint(
                        f"{self.directory}: {name!r} at {list(offsets)} is not a tensor of shape {list(sizes)}"
                    )
                target = found[name]
                for dim, (low, length) in enumerate(zip(offsets, sizes, strict=True)):
                    target = target.narrow(dim, low, length)
                target.copy_(part)
        return found

    def value(self, name: str) -> Any:
        """The entries that are not tensors."""
        return self._load(name, ())

    def _load(self, name: str, offsets: tuple[int, ...]) -> Any:
        if (name, offsets) not in self._places:
            raise DamagedCheckpoint(
                f"{self.directory}: the index does not say where {name!r} at {list(offsets)} is, or it is transformed"
            )
        relative, low, length = self._places[name, offsets]
        path = inside(self.directory, relative)
        if low < 0 or length < 0 or not path.is_file() or low + length > path.stat().st_size:
            raise DamagedCheckpoint(f"{self.directory}: {relative} is missing or too short for {name!r}")
        with path.open("rb") as file:
            file.seek(low)
            return load_pickle(io.BytesIO(file.read(length)), f"{path} ({name})")


class _StandIn:
    """Stands in for a class of torch.distributed.checkpoint: has only what its pickle sets."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        elif isinstance(state, tuple) and state:  # TensorProperties: its dtype comes first
            self.__dict__["dtype"] = state[0]


_CLASSES = frozenset(
    (
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
        ),
        *(("torch.distributed.checkpoint.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    )
)
_PLAIN = {
    ("torch.serialization", "_get_layout"): lambda *_: None,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda *_: None,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): lambda *_: None
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath")
    },
}


class _Index(pickle.Unpickler):
    """Knows the classes of an index, as stand-ins; they are created for each file, so that one file cannot change another's."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return self._made.setdefault((module, name), type(name, (_StandIn,), {}))
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _Foreign(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the index refers to persistent data outside itself")


class _Foreign(Exception):
    """A class that an index does not contain."""


_SIZED = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"))


def _check_sizes(content: bytes) -> None:
    """Parse a pickle without executing it: sizes and indices beyond the file would allocate memory for nothing.

    Raises:
        ValueError: it is not a pickle, or has such an entry.
    """
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _SIZED and int(argument or 0) > len(content):
            raise ValueError(f"{operation.name} {argument} in {len(content)} bytes")


def _unpickled(path: Path) -> Any:
    try:
        with os.fdopen(open_file(path), "rb") as file:
            content = file.read()
        _check_sizes(content)
        return _Index(io.BytesIO(content)).load()
    except _Foreign as error:
        raise ValueError(
            f"{path} holds {error}, which a checkpoint's index does not contain: it is not read"
        ) from error
    except FileNotFoundError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
