"""The files of a checkpoint: written to the disk for certain, and read back with suspicion."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

CHUNK = 1 << 24
"""Bytes that are written and summed at a time: they are still in the processor's cache for the second."""
THREADS = 2
"""Files that are checked at a time; a second thread halves the time, more only wait for memory."""

Record = dict[str, Any]
"""What a manifest says of a file: ``{"bytes": size, "crc32": checksum}``. CRC-32 finds damage (4 GB/s); it is no defence against an author."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, changed since it was written, or of an unknown form. The message has the file and the reason."""


def sync(path: Path) -> None:
    """Wait until a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, parts: Iterable[Any]) -> Record:
    """Write a new file out of bytes-like parts, straight from their memory, and wait until it is on the disk. No part is copied."""
    size, total = 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for low in range(0, len(view), CHUNK):
                chunk = view[low : low + CHUNK]
                total = zlib.crc32(chunk, total)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
            size += len(view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "crc32": f"{total:08x}"}


def record(path: Path) -> Record:
    """A file's size and checksum."""
    size, total, buffer = 0, 0, bytearray(CHUNK // 4)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total = zlib.crc32(view[:count], total)
            size += count
    return {"bytes": size, "crc32": f"{total:08x}"}


def write_json(path: Path, value: Any) -> Record:
    """Write and sync a JSON value."""
    return write_file(path, [json.dumps(value, allow_nan=False, indent=1).encode()])


def read_json(path: Path) -> Any:
    """A JSON value; one that cannot be read is a :class:`DamagedCheckpoint`."""
    return parse_json(path, path.read_bytes())


def parse_json(path: Any, text: bytes) -> Any:
    """What :func:`read_json` gives, of text that came from ``path``."""
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as JSON: {error}") from error


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


def verify(directory: Path, files: Mapping[str, Record], names: Sequence[str]) -> None:
    """Read these files and compare size and checksum with ``files``.

    Raises:
        DamagedCheckpoint: one is missing, or is not what was written.
    """

    def check(name: str) -> None:
        path, expected = inside(directory, name), files[name]
        try:
            found = record(path)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{directory}: {name} is missing") from error
        if found != expected:
            raise DamagedCheckpoint(f"{directory}: {name} is not what was written: found {found}, expected {expected}")

    in_parallel(check, sorted(names, key=lambda name: -int(files[name]["bytes"])))


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """``work`` of each item, a few at a time; the first error is raised when all have ended."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items))) as pool:
        return [future.result() for future in [pool.submit(work, item) for item in items]]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
