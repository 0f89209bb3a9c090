"""The files of a checkpoint: written durably, and read without trusting them."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os.path import islink
from pathlib import Path
from typing import Any, NoReturn

from engine.utils.text import terminal_text

CHUNK = 1 << 22
"""Bytes that are written and checksummed at a time: few enough to stay in the processor's cache."""
BLOCK = 1 << 26
"""Bytes per checksum: several threads, and several ranks, share the work of checking one file."""
_READ = 1 << 20
"""Bytes that are read and checksummed at a time."""
SMALL = 1 << 20
"""Total bytes of files up to which a single thread reads or writes them: starting more would take longer."""
LARGEST_JSON = 1 << 30
"""The maximum bytes of a JSON file; larger ones are neither written nor read."""
THREADS = min(8, os.cpu_count() or 1)
"""The maximum number of threads that read or write files at once."""

_ALLOWED = f"and a JSON file of a checkpoint has at most {LARGEST_JSON:,}"

Record = dict[str, Any]
"""A manifest's record of a file: ``{"bytes": size, "crc32": [checksum of each block of 64 MiB]}``. CRC-32 (4 GB/s per core) finds damage;
it does not protect against attackers."""


class DamagedCheckpoint(ValueError):
    """A checkpoint is incomplete, has changed since it was written, or has an unknown form. The message names the file and the reason."""

    def __init__(self, message: str = "") -> None:
        super().__init__(terminal_text(message))  # the message may quote text from a hostile file


def is_entry(name: object) -> bool:
    """Whether ``name`` can be the name of a folder's entry: printable, not a path, and not ``.`` or ``..``."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and name.isprintable()


def check_entry(root: object, name: str) -> str:
    """Return ``name`` if :func:`is_entry` accepts it as the name of a checkpoint in ``root``.

    Raises:
        ValueError: it does not.
    """
    if not is_entry(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint in {root}")
    return name


def sync(path: Path | str) -> None:
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
    """Write a new file from bytes-like parts without copying them, and wait until it is on the disk."""
    size, sums = 0, [0]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                if size and size % BLOCK == 0:
                    sums.append(0)
                chunk = view[: min(CHUNK, BLOCK - size % BLOCK)]
                view, size = view[len(chunk) :], size + len(chunk)
                sums[-1] = zlib.crc32(chunk, sums[-1])
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": size, "crc32": [f"{checksum:08x}" for checksum in sums]}


def write_json(path: Path, value: Any) -> Record:
    """Write and sync a JSON value.

    Raises:
        ValueError: the text would have more than :data:`LARGEST_JSON` bytes, and could not be read again.
    """
    text = json_text(value)
    if len(text) > LARGEST_JSON:
        raise ValueError(f"{path.name} would have {len(text):,} bytes, {_ALLOWED}: keep large values as tensors")
    return write_file(path, [text])


encode_json = json.JSONEncoder(allow_nan=False).encode
"""Encode a JSON value as one line of text."""


def json_text(value: Any) -> bytes:
    """Encode a JSON value as text, with each entry of a dict on its own line. (``indent`` would read better, but is ten times as slow.)"""
    if not isinstance(value, dict) or not value:
        return encode_json(value).encode()
    lines = [f"{encode_json(key)}: {encode_json(entry)}" for key, entry in value.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_json(path: Path) -> Any:
    """Read a JSON file; :class:`DamagedCheckpoint` if it is not valid JSON, or too large."""
    with os.fdopen(open_file(path), "rb") as file:
        check_json_size(path, os.fstat(file.fileno()).st_size)
        return parse_json(path, file.read(LARGEST_JSON) or b"")  # None if a read would block, as of /proc/kmsg


def check_json_size(path: Any, size: int) -> None:
    """Check that a JSON file of ``size`` bytes is not larger than :data:`LARGEST_JSON`.

    Raises:
        DamagedCheckpoint: it is larger.
    """
    if size > LARGEST_JSON:
        raise DamagedCheckpoint(f"{path} has {size:,} bytes, {_ALLOWED}")


def open_file(path: Path) -> int:
    """Open a regular file for reading, without blocking, and return its descriptor.

    Raises:
        DamagedCheckpoint: ``path`` is a pipe, a device or a directory, which could block forever when it is opened or read.
    """
    if stat.S_ISREG(os.stat(path).st_mode):  # checked first: opening a device may have side effects
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise DamagedCheckpoint(f"{path} is not a file")


@contextmanager
def stable_name(file: Any) -> Iterator[Any]:
    """Keep the file at a path open, and yield a path that leads to it even if another file takes its place meanwhile.

    An argument that is not a path is yielded unchanged.

    Raises:
        DamagedCheckpoint: it is not a regular file, as in :func:`open_file`.
    """
    if not isinstance(file, str | os.PathLike):
        yield file
        return
    descriptor = open_file(Path(file))
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def fill(path: Path, descriptor: int, memory: memoryview, offset: int) -> None:
    """Fill ``memory`` with a file's bytes from ``offset`` on. The file is not mapped: truncating a mapped file kills the process.

    Raises:
        DamagedCheckpoint: the file is too short.
    """
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise DamagedCheckpoint(f"{path} has become shorter while it was read")
        memory, offset = memory[count:], offset + count


def parse_json(path: Any, text: bytes) -> Any:
    """Parse JSON with the errors of :func:`read_json`, which name ``path`` as the source of ``text``."""
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read as JSON: {error}") from error


def inside(directory: Path, name: str) -> Path:
    """The path of the file ``name`` in a checkpoint's ``directory``.

    Raises:
        DamagedCheckpoint: ``name`` leads out of the directory, by ``..``, as an absolute path or by a link.
    """
    path = directory / name
    folder, _, file = name.rpartition("/")
    plain = is_entry(file) and (not folder or (is_entry(folder) and not islink(path.parent)))
    if plain and not islink(path):
        return path  # the usual case, without resolving each parent folder
    try:
        if path.resolve().is_relative_to(directory.resolve()):
            return path
    except (ValueError, OSError, RuntimeError):  # a NUL or another character that no file name has, or a loop of links
        pass
    raise DamagedCheckpoint(f"{directory}: the manifest names the file {name!r}, which leads out of the checkpoint")


def blocks(files: Mapping[str, Record], names: Iterable[str]) -> list[tuple[str, int]]:
    """All blocks of the files ``names`` that have a checksum, as (file name, index of the block)."""
    return [(name, index) for name in names for index in range(len(files[name]["crc32"]))]


def verify(directory: Path, files: Mapping[str, Record], chosen: Sequence[tuple[str, int]]) -> None:
    """Read the ``chosen`` blocks, and compare sizes and checksums with the records in ``files``.

    Raises:
        DamagedCheckpoint: a file is missing or has changed.
    """

    def check(block: tuple[str, int]) -> None:
        name, index = block
        path, expected = inside(directory, name), files[name]
        try:
            checksum = _block_checksum(path, expected["bytes"], index)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{directory}: {name} is missing") from error
        if checksum != expected["crc32"][index]:
            raise DamagedCheckpoint(
                f"{directory}: {name} is not what was written: block {index} of 64 MiB has the checksum {checksum}, "
                f"expected {expected['crc32'][index]}"
            )

    in_parallel(check, chosen, sum(files[name]["bytes"] for name in {name for name, _ in chosen}))


def _block_checksum(path: Path, size: int, index: int) -> str:
    """The checksum of one block; if the file does not have ``size`` bytes, a text that equals no checksum."""
    descriptor = open_file(path)
    try:
        if os.fstat(descriptor).st_size != size:
            return f"of {os.fstat(descriptor).st_size} bytes"
        low, high = index * BLOCK, min(size, (index + 1) * BLOCK)
        if low >= high:
            return f"{0:08x}"
        memory, checksum = memoryview(bytearray(min(_READ, high - low))), 0
        for offset in range(low, high, _READ):
            part = memory[: min(_READ, high - offset)]
            fill(path, descriptor, part, offset)
            checksum = zlib.crc32(part, checksum)
        return f"{checksum:08x}"
    finally:
        os.close(descriptor)


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any], size: int = SMALL + 1) -> list[Any]:
    """Call ``work`` on each item, in several threads; raise the first error when all threads have ended.

    The threads are plain ones: a pool accepts no work while the interpreter exits, when a last checkpoint may be written.

    Args:
        size: total bytes that ``work`` reads or writes. Up to :data:`SMALL` bytes, this thread does all the work.
    """
    if size <= SMALL:
        return [work(item) for item in items]
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    remaining = iter(enumerate(items))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                index, item = next(remaining, (-1, None))
            if index < 0:
                return
            try:
                results[index] = work(item)
            except BaseException as error:
                errors.append(error)

    threads = []
    with suppress(RuntimeError):  # an exiting interpreter starts no threads: this one then does all the work
        for _ in range(min(THREADS, len(items)) - 1):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            threads.append(thread)
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")
