"""Where checkpoints are stored: a directory, or a URL that fsspec knows (``s3://``, ``gs://``, ``memory://``, ...)."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint import directory
from engine.checkpoint.files import DamagedCheckpoint, Record, check_entry, read_json
from engine.checkpoint.manifest import FOLDERS, JOINED, MANIFEST, check_manifest, manifest_of, next_serial
from engine.checkpoint.one_file import is_one_file, unpack
from engine.checkpoint.remote_storage import Remote


class Location(Protocol):
    """A directory of checkpoints: a :class:`Local` or a :class:`Remote`. Paths are in the form that users see and ``resume`` accepts."""

    root: str
    shared: bool
    """Whether all ranks read the same files, rather than their own copies."""

    def path(self, name: str) -> Path | str:
        """The path of the checkpoint of this name."""

    def begin(self, name: str, first: bool, folders: Sequence[str] = FOLDERS) -> None:
        """Prepare a draft with these ``folders``; every rank calls it, ``first`` (one of them) before the others."""

    def draft(self, name: str) -> Path:
        """The directory into which this rank writes its files."""

    def send(self, name: str, files: Iterable[str]) -> None:
        """Note that this rank has written these files."""

    def seal(
        self,
        name: str,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        """Turn the draft into a checkpoint when all ranks have written; one rank calls it. Arguments: as of :func:`manifest_of`."""

    def abandon(self, name: str, first: bool) -> None:
        """Remove the draft."""

    def manifests(self) -> dict[str, dict[str, Any]]:
        """The manifests of the complete checkpoints by name, oldest first."""

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of the checkpoint of this name; a missing or damaged one is an error."""

    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and manifests of the complete checkpoints in any order; each is read when it is asked for."""

    def damaged(self, complete: Container[str] | None = None) -> dict[str, str]:
        """Incomplete checkpoints by name, with the reason; ``complete``: names in :meth:`manifests`, if the caller has read them."""

    def unusable(self) -> dict[str, str]:
        """Those of :meth:`damaged` that are neither drafts nor remains of a removal."""

    def fetch(self, name: str) -> Path:
        """A local directory with the checkpoint's files."""

    def remove(self, name: str) -> bool:
        """As :func:`engine.checkpoint.directory.remove`; a ``name`` that leads out of this directory is a ``ValueError``."""

    def busy(self, name: str) -> bool:
        """Whether the checkpoint of this name must not be replaced: it is being read, or this version cannot read it."""

    def sweep(self) -> None:
        """Delete what killed runs left."""


def locate(root: str | Path) -> Location:
    """The :class:`Location` of a path or a URL."""
    return Remote(str(root)) if "://" in str(root) else Local(Path(root))


def same(one: Location, other: Location) -> bool:
    """Whether both paths name one directory, in any spelling."""
    return one.root == other.root or (
        one.shared and other.shared and os.path.realpath(one.root) == os.path.realpath(other.root)
    )


def split(path: str | Path) -> tuple[Location, str]:
    """The :class:`Location` and the name of a checkpoint, from its path or URL."""
    if "://" in str(path):
        root, _, name = str(path).rstrip("/").rpartition("/")
        return Remote(root), name
    local = Path(path)
    return (OneFile if is_one_file(local) else Local)(local.parent), local.name


_REMAINS = {
    ".partial": "not finished: a run is writing it, or was killed while it did",
    ".replaced": "an older one of the same name, which a newer one has replaced",
    ".removed": "its removal was interrupted",
}


@dataclass(frozen=True)
class _Written:
    """A checkpoint that this process has written."""

    name: str
    files: Mapping[str, Record]
    manifest: Record

    def is_whole(self, root: Path) -> bool:
        """Check that it is still there as it was written."""
        return directory.is_as_written(root / self.name, self.files, self.manifest)


class Local:
    """A directory that all ranks share."""

    shared = True

    def __init__(self, root: Path) -> None:
        self.directory = root.absolute()  # a script may change the current directory
        self.root = str(self.directory)
        self._lock: int | None = None
        self._serial, self._known = 0, set[tuple[str, int, int]]()
        self._newest: _Written | None = None
        self._new = True
        """The directory may not be on the disk yet: its maker does not wait for that."""

    def path(self, name: str) -> Path:
        return self.directory / name

    def draft(self, name: str) -> Path:
        return directory.draft(self.path(name))

    def begin(self, name: str, first: bool, folders: Sequence[str] = FOLDERS) -> None:
        if first:
            self._lock = directory.begin(self.path(name), self._new, folders)
            self._new = False

    def send(self, name: str, files: Iterable[str]) -> None:
        """Nothing to do: the files are in the draft."""

    def seal(
        self,
        name: str,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        # Each manifest is read once. Other jobs, and other writers of this one, may save here too.
        self._serial = next_serial([self._serial, *directory.new_serials(self.directory, self._known)])
        manifest = manifest_of(world_size, facts, files, self._serial, trees)
        self._newest = _Written(name, files, directory.seal(self.path(name), manifest, files))
        self._known.add(directory.identity(name, os.stat(self.path(name))))
        self._unlock()

    def abandon(self, name: str, first: bool) -> None:
        if first and self._lock is not None:
            shutil.rmtree(self.draft(name), ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def manifests(self) -> dict[str, dict[str, Any]]:
        return {path.name: manifest for path, manifest in directory.read_manifests(self.directory).items()}

    def manifest(self, name: str) -> dict[str, Any]:
        return check_manifest(self.path(name), read_json(self.path(name) / MANIFEST))

    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((path.name, manifest) for path, manifest in directory.complete(self.directory))

    def damaged(self, complete: Container[str] | None = None) -> dict[str, str]:
        found: dict[str, str] = {}
        complete = self.manifests() if complete is None else complete
        for name in sorted(os.listdir(self.root)) if self.directory.is_dir() else ():
            try:
                if name not in complete and any(
                    _exists(f"{self.root}/{name}/{part}") for part in (*FOLDERS, JOINED, MANIFEST)
                ):
                    found[name] = self._reason(self.path(name))
            except OSError as error:
                found[name] = str(error)
        return found

    def _reason(self, path: Path) -> str:
        if path.suffix in _REMAINS and path.name.startswith("."):
            return _REMAINS[path.suffix]
        try:
            directory.read_manifest(path)
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except (DamagedCheckpoint, OSError) as error:
            return str(error).removeprefix(f"{path}: ")
        return "it was incomplete a moment ago"

    def unusable(self) -> dict[str, str]:
        remains = set(_REMAINS.values())
        return {
            name: why
            for name, why in self.damaged().items()
            if why not in remains and directory.is_one(self.path(name))
        }

    def fetch(self, name: str) -> Path:
        return self.path(name)

    def remove(self, name: str) -> bool:
        newest, path = self._newest, self.path(check_entry(self.root, name))
        another = newest is not None and newest.name != name and newest.is_whole(self.directory)
        return directory.remove(path, another)

    def busy(self, name: str) -> bool:
        path = self.path(name)
        return directory.is_one(path) and (not directory.is_readable(path) or directory.is_read(path))

    def sweep(self) -> None:
        directory.sweep(self.directory)


def _exists(path: str) -> bool:
    """Whether there is something; a folder that may not be read is an error."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


class OneFile(Local):
    """A directory with one-file checkpoints (:mod:`engine.checkpoint.one_file`). Each rank reads its own copy of the files in one."""

    shared = False

    def fetch(self, name: str) -> Path:
        folder = tempfile.mkdtemp(prefix="checkpoints-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        unpack(self.path(name), Path(folder) / name)
        return Path(folder) / name
