"""A checkpoint as one file, which is easier to move: a zip archive of its folder, without compression. Opening it runs no code."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.files import CHUNK, DamagedCheckpoint, check_json_size, inside, open_file, parse_json, read_json
from engine.checkpoint.local_storage import LocalStorage
from engine.checkpoint.manifest import FOLDERS, MANIFEST, check_manifest
from engine.utils.paths import expanded

_HEAD = struct.Struct("<4s22xH2x")
"""The header of an archive's first entry: the signature, and the length of the name that follows."""
_ENCRYPTED = 1
"""The flag of an encrypted entry."""


class OneFileStorage(LocalStorage):
    """A directory with checkpoints that are one file each. Each rank unpacks its own copy of the checkpoint that it reads."""

    shared = False

    def has(self, name: str) -> bool:
        return is_one_file(self.path(name))

    def fetch(self, name: str) -> Path:
        folder = tempfile.mkdtemp(prefix="checkpoints-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        unpack_folder(self.path(name), Path(folder) / name)
        return Path(folder) / name


def is_one_file(path: str | Path) -> bool:
    """Whether a local path is a checkpoint in one file; the file may be damaged."""
    if "://" in str(path):
        return False
    try:
        descriptor = open_file(Path(expanded(path)))
    except (OSError, ValueError):  # no such file, not a regular one, or a name that no file can have
        return False
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(_HEAD.size + len(MANIFEST))
        if len(head) == _HEAD.size + len(MANIFEST):
            signature, length = _HEAD.unpack_from(head)
            if signature == b"PK\3\4" and length == len(MANIFEST) and head.endswith(MANIFEST.encode()):
                return True  # True also for a truncated archive
        try:
            with _archive(path, file) as archive:  # another program may have put the manifest elsewhere
                return MANIFEST in archive.namelist()
        except DamagedCheckpoint:
            return False


def check_local(path: Path | str) -> None:
    """Check that ``path`` is a local one.

    Raises:
        ValueError: ``path`` is a URL.
    """
    if "://" in str(path):
        raise ValueError(f"{path}: a checkpoint is one file only at a local path; at a URL it is a folder")


def pack_folder(folder: Path, file: Path) -> None:
    """Write the checkpoint in ``folder`` as ``file``: the manifest and the files that it lists. An existing ``file`` is replaced at the end.

    Raises:
        DamagedCheckpoint: a link in the folder leads out of it, or a listed file is not a regular one, or has another size.
    """
    for path in folder.rglob("*"):
        inside(folder, str(path.relative_to(folder)))
    files = check_manifest(folder, read_json(inside(folder, MANIFEST)))["files"]
    written = file.with_name(f".{file.name}.partial")
    try:
        with zipfile.ZipFile(written, "w") as archive:
            for name in (MANIFEST, *files):
                with os.fdopen(open_file(inside(folder, name)), "rb") as source:
                    entry = zipfile.ZipInfo(name)
                    entry.file_size, entry.external_attr = os.fstat(source.fileno()).st_size, 0o644 << 16
                    if name in files and entry.file_size != files[name]["bytes"]:
                        raise DamagedCheckpoint(
                            f"{folder}: {name} has {entry.file_size} bytes, and had {files[name]['bytes']} when it was written"
                        )
                    with archive.open(entry, "w") as target:
                        shutil.copyfileobj(source, target, CHUNK)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    os.replace(written, file)


def unpack_folder(file: Path, folder: Path) -> None:
    """Unpack the archive ``file`` into a new ``folder``, after checking its files against its manifest.

    Raises:
        DamagedCheckpoint: the archive is damaged, encrypted or compressed, does not match its manifest, or a name leads out of the folder.
    """
    with os.fdopen(open_file(file), "rb") as opened, _archive(file, opened) as archive:
        entries = _checked_entries(file, os.fstat(opened.fileno()).st_size, archive.infolist())
        check_json_size(f"{file}: {MANIFEST}", entries[MANIFEST].file_size)
        with archive.open(entries[MANIFEST]) as source:
            records = check_manifest(file, parse_json(f"{file}: {MANIFEST}", source.read()))["files"]
        if unmatched := sorted(entries.keys() ^ {MANIFEST, *records}):
            raise DamagedCheckpoint(
                f"{file}: {unmatched[0]} is {'not in the manifest' if unmatched[0] in entries else 'missing'}"
            )
        for name in records:
            if entries[name].file_size != records[name]["bytes"]:
                raise DamagedCheckpoint(
                    f"{file}: {name} has {entries[name].file_size} bytes, and had {records[name]['bytes']} when it was written"
                )
        for name in FOLDERS:
            (folder / name).mkdir(parents=True)
        for name, entry in entries.items():
            target = inside(folder, name)
            target.parent.mkdir(exist_ok=True)
            with archive.open(entry) as source, target.open("xb") as copy:
                shutil.copyfileobj(source, copy, CHUNK)


def _checked_entries(file: Path, size: int, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Check the entries of an archive of ``size`` bytes, and return its files by name."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        if info.flag_bits & _ENCRYPTED:
            raise DamagedCheckpoint(f"{file}: {name} is encrypted: pack the checkpoint again with fit checkpoint pack")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise DamagedCheckpoint(
                f"{file}: {name} is compressed, which a checkpoint's archive is not: pack it with fit checkpoint pack, or zip -0"
            )
        if info.is_dir() and not info.file_size:
            continue  # other programs, and earlier versions, write the folders too
        if name in entries:
            raise DamagedCheckpoint(f"{file}: it has {name} twice")
        entries[name] = info
    if MANIFEST not in entries:
        raise DamagedCheckpoint(f"{file}: {MANIFEST} is missing")
    if sum(info.file_size for info in entries.values()) > size:
        raise DamagedCheckpoint(f"{file}: its files would be larger than the archive itself")
    return entries


@contextmanager
def _archive(path: str | Path, file: Any) -> Iterator[zipfile.ZipFile]:
    """Open the archive in an open file; damage that is found inside the context raises :class:`DamagedCheckpoint`."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except DamagedCheckpoint:
        raise
    except (*_DAMAGE, OSError) as error:
        # EINVAL: a damaged archive names an impossible position.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpoint(f"{path} is a damaged archive: {type(error).__name__}: {error}") from error


_DAMAGE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    struct.error,
    zlib.error,
    EOFError,
    ValueError,
    LookupError,
    RuntimeError,
    OverflowError,
    MemoryError,
)  # fmt: skip
"""Errors that ``zipfile`` raises on damaged archives; ``RuntimeError``: an entry is encrypted, or (``NotImplementedError``) needs a newer program."""
