"""The files of a checkpoint: written to the disk for certain, and read back with suspicion."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from engine.checkpoint.state import TENSOR_DTYPES, pack, same_memory, unpack


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, changed since it was written, or of an unknown form. The message has the file and the reason."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; all have it for files.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def record(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256 (about 1 GB/s)."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_json(path: Path, value: Any) -> None:
    """Write and sync a JSON value."""
    path.write_text(json.dumps(value, allow_nan=False, indent=1), encoding="utf-8")
    sync(path)


def write_tree(stem: Path, tree: Any) -> None:
    """Write ``<stem>.json`` and, when the tree has tensors, ``<stem>.safetensors``."""
    value, tensors = pack(tree)
    write_json(stem.with_name(stem.name + ".json"), value)
    if tensors:
        _write_tensors(stem.with_name(stem.name + ".safetensors"), tensors, {})


def write_model(path: Path, model: Mapping[str, Tensor]) -> None:
    """Write named tensors, each memory once; the names that share one stand in the file's metadata.

    Raises:
        TypeError: something that is no dense tensor of a type that safetensors has.
    """
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in TENSOR_DTYPES or tensor.is_meta or tensor.layout != torch.strided:
            found = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"the model's {name!r} ({found}) cannot be stored: convert it to a dense tensor of a type that safetensors has")
        known = first.setdefault(same_memory(tensor), name)
        if known == name:
            kept[name] = tensor
        else:
            aliases[name] = known
    _write_tensors(path, kept, {"format": "pt", "aliases": json.dumps(aliases)})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        there = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = there.untyped_storage().data_ptr()
        # Safetensors refuses different views of one memory: each gets its own.
        ready[name] = there.clone() if storage in seen else there
        seen.add(storage)
    save_file(ready, path, metadata=metadata)
    sync(path)


def inside(directory: Path, name: str) -> Path:
    """The path of the file ``name`` of the checkpoint.

    Raises:
        DamagedCheckpoint: it leads out of the directory, by ``..``, as an absolute path or by a link.
    """
    path = directory / name
    try:
        if path.resolve().is_relative_to(directory.resolve()):
            return path
    except ValueError:  # a NUL, or text that is no file name
        pass
    raise DamagedCheckpoint(f"{directory}: the manifest names the file {name!r}, which leads out of the checkpoint")


def read_json(path: Path) -> Any:
    """A JSON value; one that cannot be read is a :class:`DamagedCheckpoint`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as JSON: {error}") from error


def read_tree(directory: Path, files: Mapping[str, Any], stem: str) -> Any:
    """What :func:`write_tree` wrote, checked against ``files`` (name -> :func:`record`). Tensors are on the CPU."""
    value = read_json(_verified(directory, files, f"{stem}.json"))
    tensors = _read_tensors(directory, files, f"{stem}.safetensors")[0] if f"{stem}.safetensors" in files else {}
    try:
        return unpack(value, tensors)
    except ValueError as error:
        raise DamagedCheckpoint(f"{directory}: {stem}.json: {error}") from error


def read_model(directory: Path, files: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """What :func:`write_model` wrote, checked against ``files``. Names that shared a memory have the same tensor."""
    model, metadata = _read_tensors(directory, files, name)
    try:
        for alias, kept in json.loads(metadata.get("aliases", "{}")).items():
            model[alias] = model[kept]
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise DamagedCheckpoint(f"{directory}: {name} has unusable aliases: {type(error).__name__}: {error}") from error
    return model


def _read_tensors(directory: Path, files: Mapping[str, Any], name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    path = _verified(directory, files, name)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{directory}: {name} cannot be read: {error}") from error


def _verified(directory: Path, files: Mapping[str, Any], name: str) -> Path:
    if name not in files:
        raise DamagedCheckpoint(f"{directory}: the manifest does not list {name}")
    path = inside(directory, name)
    found: Any = None
    with suppress(FileNotFoundError):
        found = record(path)
    if found != files[name]:
        raise DamagedCheckpoint(f"{directory}: {name} is not what was written: found {found}, expected {files[name]}")
    return path


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
