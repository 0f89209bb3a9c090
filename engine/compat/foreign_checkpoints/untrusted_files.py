"""Reads weights and states from other libraries' files without trusting the files.

Unpickling can call any function that the pickle names. Pickles are therefore read with ``torch.load(weights_only=True)``, and the index of a
``torch.distributed.checkpoint`` directory with an unpickler that only knows inert stand-ins for the classes of such an index.

A small pickle can also expand to more values than any machine can visit: a list that contains the same list many times, which contains another one
many times. The expanded size is therefore computed, visiting each object once, before anything walks through the values.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.checkpoint.files import DamagedCheckpoint, inside, open_file
from engine.checkpoint.tensor_files import Stored
from engine.utils.text import terminal_text

PICKLE = (
    "is a pickle, which can run code when it is opened: --trust-pickle (trust_pickle=True) reads it anyway, tensors and plain values "
    "only, through torch's weights_only"
)
METADATA = ".metadata"


class Tensors(Protocol):
    """A mapping from names to tensors, each of which is read when it is asked for."""

    @property
    def stored(self) -> Mapping[str, Stored]: ...
    def whole_tensors(self, names: Sequence[str]) -> dict[str, Tensor]: ...


class InMemory:
    """Tensors in memory, or mapped from a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.stored = {name: Stored(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    def whole_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name].detach().cpu() for name in names}


def load_pickle(file: Any, where: object, mmap: bool = False) -> Any:
    """Load a ``torch.save`` file that contains only tensors and plain values.

    Raises:
        ValueError: the file contains anything else; the message names it.
        DamagedCheckpoint: the file cannot be read, or expands to far more values than it contains (:func:`check_bounds`).
    """
    try:
        check_pickles(where, file)
        with torch.serialization.safe_globals([PosixPath, WindowsPath]):  # common in hyperparameters, and harmless
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        check_bounds(where, loaded)
        return loaded
    except DamagedCheckpoint:
        raise
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL " in text or "global" in text:
            name = text.partition("GLOBAL ")[2].split(" ")[0] or text.splitlines()[0]
            raise ValueError(
                f"{where} holds {terminal_text(name)}, which is neither a tensor nor a plain value: it is not read. Save the file without it, or "
                "load it where it comes from and save its state_dict()"
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
        ValueError: the index contains an unexpected class.
        DamagedCheckpoint: the index cannot be read, or parts are missing.
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
        """Take over the names, shapes and file positions of all entries."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Name of an entry -> its path in the saved tree."""
        self.stored: dict[str, Stored] = {}
        self.values: list[str] = []
        """Names of the entries that are not tensors."""
        self._positions = {
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

    def whole_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name] = torch.empty(self.stored[name].shape, dtype=self.stored[name].dtype)
            for offsets, sizes in self._chunks[name]:
                part = self._load(name, offsets)
                if not isinstance(part, Tensor) or tuple(part.shape) != sizes:
                    raise DamagedCheckpoint(
                        f"{self.directory}: {name!r} at {list(offsets)} is not a tensor of shape {list(sizes)}"
                    )
                target = tensors[name]
                for dim, (low, length) in enumerate(zip(offsets, sizes, strict=True)):
                    target = target.narrow(dim, low, length)
                target.copy_(part)
        return tensors

    def value(self, name: str) -> Any:
        """The value of an entry that is not a tensor."""
        return self._load(name, ())

    def _load(self, name: str, offsets: tuple[int, ...]) -> Any:
        """Load the part of the entry ``name`` that starts at ``offsets``."""
        if (name, offsets) not in self._positions:
            raise DamagedCheckpoint(
                f"{self.directory}: the index does not say where {name!r} at {list(offsets)} is, or it is transformed"
            )
        relative, low, length = self._positions[name, offsets]
        path = inside(self.directory, relative)
        if low < 0 or length < 0 or not path.is_file() or low + length > path.stat().st_size:
            raise DamagedCheckpoint(f"{self.directory}: {relative} is missing or too short for {name!r}")
        with os.fdopen(open_file(path), "rb") as file:
            file.seek(low)
            return load_pickle(io.BytesIO(file.read(length)), f"{path} ({name})")


class _StandIn:
    """Base of the stand-ins for classes of torch.distributed.checkpoint: has only the attributes that the pickle sets."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        elif isinstance(state, tuple) and state:  # the state of TensorProperties, whose first item is the dtype
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
_HARMLESS = {
    ("torch.serialization", "_get_layout"): lambda *_: None,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda *_: None,
    ("builtins", "getattr"): lambda *_: None,  # Python 3.11.0 to 3.11.3 pickle members of enumerations by it
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
    """Unpickles an index with stand-ins for its classes. Each file gets its own stand-ins, so that no file can modify another's."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return self._stand_ins.setdefault((module, name), type(name, (_StandIn,), {}))
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _ForbiddenClass(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("the index refers to persistent data outside itself")


class _ForbiddenClass(Exception):
    """The index contains a class that is not allowed in one."""


_FACTOR, _FREE = 16, 1_000_000
"""A file may expand to at most ``_FACTOR`` times the values that it contains, plus ``_FREE``."""
_LARGE = 1 << 26
"""The largest number allowed in a pickle with a ``bytearray``, because it may be the array's size in bytes."""
_DEEPEST = 200
"""The maximum nesting depth; a deeper tree cannot be written as JSON."""


def check_bounds(where: object, tree: Any) -> None:
    """Check that it is feasible to walk through a tree.

    Raises:
        DamagedCheckpoint: the tree has too many values (an object counts as often as it occurs), is nested too deeply or contains itself, or a
            tensor has many times the elements that its memory holds.
    """
    sizes: dict[int, tuple[int, int]] = {}  # values in each container, and how deep they are nested
    open_nodes: set[int] = set()
    count, pending = 0, [tree]
    while pending:
        node = pending[-1]
        inner = _inner(node)
        if id(node) in sizes or inner is None:
            _check_tensor(where, node)
            pending.pop()
        elif id(node) in open_nodes:
            open_nodes.discard(id(node))
            pending.pop()
            measured = [sizes.get(id(value), (1, 0)) for value in inner]
            sizes[id(node)] = (
                1 + sum(size for size, _ in measured),
                1 + max((depth for _, depth in measured), default=0),
            )
            if sizes[id(node)][1] > _DEEPEST:
                raise DamagedCheckpoint(
                    f"{where} is nested more than {_DEEPEST} levels deep, and cannot be a checkpoint"
                )
        else:
            open_nodes.add(id(node))
            count += len(inner)
            if any(id(value) in open_nodes for value in inner):
                raise DamagedCheckpoint(f"{where} has a value that holds itself, and cannot be a checkpoint")
            pending += [value for value in inner if id(value) not in sizes]
    if sizes.get(id(tree), (0, 0))[0] > _FREE + _FACTOR * count:
        raise DamagedCheckpoint(
            f"{where} holds {count:,} values, which stand for more than {_FREE + _FACTOR * count:,} because some occur in others again and again: "
            "it cannot be a checkpoint"
        )


def _inner(node: Any) -> list[Any] | None:
    """The values in a container; ``None`` if ``node`` is not a container."""
    if isinstance(node, Mapping):
        return [*node.keys(), *node.values()]
    if isinstance(node, (list, tuple, set, frozenset)):
        return list(node)
    return list(vars(node).values()) if isinstance(node, _StandIn) else None


def _check_tensor(where: object, value: Any) -> None:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        memory = value.untyped_storage().nbytes()
        if value.nbytes > _FREE + _FACTOR * memory:
            raise DamagedCheckpoint(
                f"{where} has a tensor of shape {list(value.shape)} whose {value.nbytes:,} bytes are {memory:,} bytes again and again: "
                "it cannot be a checkpoint"
            )


_MEMO_OPERATIONS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"))


def _check_memo_indices(content: bytes) -> None:
    """Parse a pickle without executing it, and check its memo indices: one far beyond the file's size would allocate memory for nothing.

    Raises:
        ValueError: it is not a pickle, or has such an index.
    """
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _MEMO_OPERATIONS and int(argument or 0) > len(content):
            raise ValueError(f"{operation.name} {argument} in {len(content)} bytes")


def check_pickles(where: object, file: Any) -> None:
    """Check a file of ``torch.save`` before it is loaded.

    Args:
        file: a path, or an open file, which is rewound afterwards. A file of another kind passes.

    Raises:
        DamagedCheckpoint: an entry is compressed, or tuples expand to too many values, which hashing them as keys of a dict would visit.
    """
    if isinstance(file, (str, os.PathLike)):
        with os.fdopen(open_file(Path(file)), "rb") as opened:
            check_pickles(where, opened)
        return
    try:
        is_archive = file.read(4) == b"PK\3\4"  # the test that torch uses
        file.seek(0)
        if not is_archive:
            for _ in range(4):  # the old format: four pickles (magic number, protocol version, system info, the object)
                _check_tuples(where, file)
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise DamagedCheckpoint(f"{where}: {entry.filename} is compressed, which torch.save does not do")
                if entry.filename.endswith(".pkl"):
                    with archive.open(entry) as inner:
                        _check_tuples(where, io.BytesIO(inner.read()))
    except DamagedCheckpoint:
        raise
    except Exception:  # torch.load will report what is wrong with the file
        return
    finally:
        file.seek(0)


_EXTENDS = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"))


def _check_tuples(where: object, file: Any) -> None:
    """Simulate one pickle's stack without executing it, and count each value as often as it is used, as a tuple's hash visits it.

    Raises:
        DamagedCheckpoint: the count is many times the number of values in the pickle, or the pickle may create a large ``bytearray`` from a number.
    """
    stack: list[list[int] | None] = []  # the number of values in each item; None for a mark
    memo: dict[int, list[int]] = {}
    used, largest, has_bytes = 0, 0, False
    for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
        name = operation.name
        largest = max(largest, argument) if type(argument) is int else largest
        has_bytes = has_bytes or (name == "GLOBAL" and str(argument).endswith(" bytearray"))
        if has_bytes and largest > _LARGE:
            raise DamagedCheckpoint(
                f"{where} has a bytearray, and a number so large that it may be its size: it is not read"
            )
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = (stack[-1] if stack else None) or [1]
            continue
        if name in ("GET", "BINGET", "LONG_BINGET", "DUP"):
            value = (stack[-1] if stack else None) if name == "DUP" else memo.get(int(argument or 0))
            stack.append(value or [1])
        else:
            operands = []
            for kind in reversed(operation.stack_before):
                while kind is pickletools.stackslice and stack and stack[-1] is not None:
                    operands.append(stack.pop())
                if kind is not pickletools.stackslice and stack:
                    operands.append(stack.pop())
            size = 1 + sum(value[0] for value in operands if value is not None)
            if name in _EXTENDS and operands and operands[-1] is not None:
                operands[-1][0] = size
                stack.append(operands[-1])
                continue
            stack += [None if kind is pickletools.markobject else [size] for kind in operation.stack_after]
            if name != "REDUCE" and "TUPLE" not in name:
                continue
        used += stack[-1][0] if stack and stack[-1] is not None else 1
        if used > _FREE + _FACTOR * count:
            raise DamagedCheckpoint(
                f"{where} holds few values, which stand for more than {used:,} because some occur in others again and again: "
                "it cannot be a checkpoint"
            )


def _unpickled(path: Path) -> Any:
    """Read a pickled index safely; errors are those of :class:`DistributedFiles`."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            content = file.read()
        _check_memo_indices(content)
        _check_tuples(path, io.BytesIO(content))
        index = _Index(io.BytesIO(content)).load()
        check_bounds(path, index)
        return index
    except _ForbiddenClass as error:
        raise ValueError(
            f"{path} holds {terminal_text(error)}, which a checkpoint's index does not contain: it is not read"
        ) from error
    except (FileNotFoundError, DamagedCheckpoint):
        raise
    except Exception as error:  # a pickle can fail in any way
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
