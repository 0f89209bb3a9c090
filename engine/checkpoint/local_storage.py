"""Checkpoints in a directory: each appears complete or not at all, and is protected while it is being read. See :mod:`engine.checkpoint.storage`."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.files import (
    DamagedCheckpoint,
    Record,
    blocks,
    check_entry,
    inside,
    open_file,
    read_json,
    sync,
    verify,
    write_json,
)
from engine.checkpoint.json_tree import unpack
from engine.checkpoint.manifest import (
    FOLDERS,
    HEAD_BYTES,
    JOINED,
    MANIFEST,
    TREES,
    WEIGHTS,
    Manifest,
    check_manifest,
    manifest_of,
    next_serial,
    serial_in,
)
from engine.checkpoint.storage import Draft, Incomplete, Storage
from engine.checkpoint.tensor_files import TensorFiles, read_tensors
from engine.utils.extensions import advice
from engine.utils.text import terminal_text

_REMAINS = {
    ".partial": "not finished: a run is writing it, or was killed while it did",
    ".replaced": "an older one of the same name, which a newer one has replaced",
    ".removed": "its removal was interrupted",
}
"""Why a hidden directory is not a complete checkpoint, by the suffix of its name."""
PLACE = "checkpoint's folder"
"""The place for which :func:`engine.utils.extensions.advice` is asked about files of other libraries."""
_SHOWN = 5
"""Names of a folder's entries that an error shows."""


@dataclass(frozen=True)
class _Written:
    """A checkpoint that this process has written, with the records of its files and its manifest."""

    name: str
    files: Mapping[str, Record]
    manifest: Record

    def is_whole(self, root: Path) -> bool:
        """Check that the checkpoint still exists in ``root``: the manifest unchanged, and all files with their sizes."""
        path = root / self.name
        try:
            verify(path, {MANIFEST: self.manifest}, [(MANIFEST, 0)])
            return all(_size(f"{path}/{name}") == record["bytes"] for name, record in self.files.items())
        except (DamagedCheckpoint, OSError):
            return False


class LocalStorage(Storage):
    """A directory that all ranks share."""

    shared = True

    def __init__(self, root: Path) -> None:
        self.directory = root.absolute()  # a script may change the current directory
        self.root = str(self.directory)
        self._serial, self._known_entries = 0, set[tuple[str, int]]()
        self._newest: _Written | None = None
        self._is_unsynced = True
        """True until the directory's own entry was synced to the disk: whatever created the directory may not have done so."""

    def path(self, name: str) -> Path:
        return self.directory / name

    def begin(self, name: str, first: bool = True, folders: Sequence[str] = FOLDERS) -> LocalDraft:
        path = self.path(name)
        draft = LocalDraft(self, name)
        if not first:
            return draft
        is_taken = os.path.exists(path) and _size(f"{path}/{MANIFEST}") is None
        if is_taken and not (path.is_dir() and not any(path.iterdir())):
            raise FileExistsError(
                f"{path} exists and is not a checkpoint ({MANIFEST} is missing): choose another path, or move it away"
            )
        if os.path.lexists(draft.folder):
            _delete(draft.folder)
        try:
            draft.folder.mkdir(parents=True)
            draft.lock()
            for folder in folders:
                os.mkdir(f"{draft.folder}/{folder}")
            if self._is_unsynced:
                sync(path.parent.parent)
        except BaseException:
            shutil.rmtree(draft.folder, ignore_errors=True)
            draft.abandon()
            raise
        self._is_unsynced = False
        return draft

    def next_serial(self) -> int:
        """The serial number of the next checkpoint, from all manifests, since other writers may save here too.

        An entry is looked at once, and of new manifests only those are read whole that have a greater serial number than all others.
        """
        with os.scandir(self.root) as entries:  # inode: there without another call for each entry
            new = {(entry.name, entry.inode()) for entry in entries if not entry.name.startswith(".")}
        new -= self._known_entries
        self._known_entries |= new
        serials = {name: self._serial_of(name) for name, _ in new}
        for name in sorted(serials, key=serials.__getitem__, reverse=True):
            if serials[name] < self._serial:
                break
            with suppress(DamagedCheckpoint, OSError):
                self._serial = max(self._serial, self.manifest(name)["serial"])
        self._serial = next_serial([self._serial])
        return self._serial

    def _serial_of(self, name: str) -> int:
        """The serial number at the beginning of a manifest, which may be damaged; 0 if there is none."""
        with (
            suppress(OSError, DamagedCheckpoint),
            os.fdopen(open_file(inside(self.path(name), MANIFEST)), "rb", 0) as file,
        ):
            return serial_in(file.read(HEAD_BYTES) or b"") or 0
        return 0

    def note_written(self, name: str, files: Mapping[str, Record], manifest: Record) -> None:
        """Remember that this process has written the checkpoint ``name``, with the records of its ``files`` and ``manifest``."""
        self._newest = _Written(name, files, manifest)
        self._known_entries.add((name, os.stat(self.path(name)).st_ino))

    def manifest(self, name: str) -> dict[str, Any]:
        return check_manifest(self.path(name), read_json(self.path(name) / MANIFEST))

    def complete(self, without: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and manifests of the complete checkpoints except ``without``; each is read when it is requested."""
        for name in self._written():
            if name != without:
                with suppress(DamagedCheckpoint, OSError):
                    yield name, read_manifest(self.path(name))

    def _written(self) -> Iterator[str]:
        """Yield the names of :meth:`written_names`, each when it is requested."""
        with os.scandir(self.root) if self.directory.is_dir() else nullcontext(()) as entries:
            for entry in entries:
                name = entry.name
                counts = not name.startswith(".") or self._stands_in(name)
                if counts and os.path.isfile(f"{self.root}/{name}/{MANIFEST}"):
                    yield name

    def _stands_in(self, name: str) -> bool:
        """Whether an entry is a replaced checkpoint that still counts: its successor has not been renamed into its place."""
        if not (name.startswith(".") and name.endswith(".replaced")):
            return False
        return not os.path.exists(f"{self.root}/{name[1:].removesuffix('.replaced')}")

    def written_names(self) -> set[str]:
        return set(self._written())

    def newest_first(self) -> list[str]:
        serials = {name: self._serial_of(name) for name in self._written()}
        # Two writers at once give equal numbers; checkpoints of format 2 and damaged ones have none.
        is_ordered = 0 not in serials.values() and len(set(serials.values())) == len(serials)
        return sorted(serials, key=serials.__getitem__, reverse=True) if is_ordered else super().newest_first()

    def is_complete(self, name: str) -> bool:
        path = self.path(name)
        try:
            if not os.path.isfile(path / MANIFEST):
                return False  # checked first: read_manifest would read all other checkpoints for its error
            read_manifest(path)
        except (DamagedCheckpoint, OSError):
            return False
        return True

    def incomplete(self, complete: Container[str] | None = None) -> dict[str, Incomplete]:
        problems: dict[str, Incomplete] = {}
        complete = self.manifests() if complete is None else complete
        for name in sorted(os.listdir(self.root)) if self.directory.is_dir() else ():
            try:
                parts = (*FOLDERS, JOINED, MANIFEST)
                if name not in complete and any(_exists(f"{self.root}/{name}/{part}") for part in parts):
                    problems[name] = self._problem(self.path(name))
            except OSError as error:
                problems[name] = Incomplete(str(error), not _is_checkpoint(self.path(name)))
        return problems

    def _problem(self, path: Path) -> Incomplete:
        """Why the entry at ``path`` is not a complete checkpoint."""
        if path.suffix in _REMAINS and path.name.startswith("."):
            return Incomplete(_REMAINS[path.suffix], True)
        try:
            read_manifest(path)
            reason = "it was incomplete when the folder was read"
        except FileNotFoundError:
            reason = f"{MANIFEST} is missing"
        except (DamagedCheckpoint, OSError) as error:
            reason = str(error).removeprefix(f"{path}: ")
        return Incomplete(reason, not _is_checkpoint(path))

    def has(self, name: str) -> bool:
        return (self.path(name) / MANIFEST).is_file()

    def fetch(self, name: str) -> Path:
        return self.path(name)

    def remove(self, name: str) -> bool:
        """Delete a checkpoint: hide it, then delete its manifest, then the rest. Of a link to a checkpoint, delete only the link."""
        path = self.path(check_entry(self.root, name))
        removed = _hidden_sibling(path, "removed")
        if os.path.exists(path):
            if _size(f"{path}/{MANIFEST}") is None:
                raise ValueError(f"{path} is not a checkpoint ({MANIFEST} is missing): it is not deleted")
            if not self._has_another(name):
                return False
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                return False
            try:
                if os.path.lexists(removed):
                    _delete(removed)
                path.rename(removed)
                if not os.path.islink(removed):
                    os.unlink(f"{removed}/{MANIFEST}")
            finally:
                os.close(lock)
        if os.path.lexists(removed):
            _delete(removed)  # not all of it, perhaps: another job's sweep may be deleting it too
            if os.path.lexists(removed):
                raise OSError(errno.ENOTEMPTY, "not all of its files could be deleted", str(removed))
        return True

    def _has_another(self, name: str) -> bool:
        """Check that a complete checkpoint other than ``name`` exists; this process's latest one is tried first, since it needs no search."""
        newest = self._newest
        if newest is not None and newest.name != name and newest.is_whole(self.directory):
            return True
        return any(self.complete(without=name))

    def must_stay(self, name: str) -> bool:
        path = self.path(name)
        return os.path.isfile(path) or (_is_checkpoint(path) and (not self.is_complete(name) or _is_being_read(path)))

    def sweep(self) -> None:
        hidden = [name for name in os.listdir(self.root) if name.startswith(".")] if self.directory.is_dir() else []
        for name in sorted(hidden):
            path = self.path(name)
            is_draft = path.suffix in _REMAINS and not (self._stands_in(name) and self.is_complete(name))
            with suppress(OSError):
                if (
                    is_draft
                    and path.is_dir()
                    and all(entry.name in (*FOLDERS, WEIGHTS, JOINED, MANIFEST) for entry in path.iterdir())
                ):
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        if _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                            shutil.rmtree(path, ignore_errors=True)
                    finally:
                        os.close(descriptor)


class LocalDraft(Draft):
    """A hidden directory beside the future checkpoint, which is renamed when complete. The first rank locks it against the sweeps of other jobs."""

    def __init__(self, storage: LocalStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self.folder = _hidden_sibling(storage.path(name), "partial")
        self._lock: int | None = None

    def lock(self) -> None:
        """Lock the draft until it is sealed or abandoned, or this process ends."""
        self._lock = os.open(self.folder, os.O_RDONLY)
        _flock(self._lock, fcntl.LOCK_EX)

    def send(self, files: Iterable[str]) -> None:
        """Do nothing: all ranks share the directory."""

    def seal(
        self,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        manifest = manifest_of(world_size, facts, files, self._storage.next_serial(), trees)
        self._storage.note_written(self._name, files, self._complete(manifest, files))
        self.unlock()

    def _complete(self, manifest: Mapping[str, Any], files: Mapping[str, Record]) -> Record:
        """Write the manifest and rename the draft to its final name. Return the record of the manifest."""
        partial, path = self.folder, self._storage.path(self._name)
        for name, record in files.items():
            if _size(f"{partial}/{name}") != record["bytes"]:
                raise FileNotFoundError(
                    f"{name} was written by its rank and is not in {partial}: all ranks need the same file system there"
                )
        record = write_json(partial / MANIFEST, manifest)
        folders = () if TREES in manifest else (*FOLDERS, WEIGHTS)
        for folder in (*folders, "."):
            if folder != WEIGHTS or (partial / folder).is_dir():
                sync(f"{partial}/{folder}")
        replaced = _hidden_sibling(path, "replaced")
        if _size(f"{path}/{MANIFEST}") is not None:
            _delete(replaced)
            path.rename(replaced)
        try:
            partial.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        sync(path.parent)
        if os.path.lexists(replaced):
            _delete(replaced)
        return record

    def abandon(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.unlock()

    def unlock(self) -> None:
        """Release the lock. (The end of the process would do it, too.)"""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# -- one checkpoint -------------------------------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that all its files exist with the right sizes; their content is not checked.

    Raises:
        DamagedCheckpoint: the checkpoint is incomplete, has changed since it was written, or has an unknown form.
        FileNotFoundError: there is no checkpoint at ``directory``; the error lists those in the same folder.
    """
    if _size(f"{directory}/{MANIFEST}") is None:
        siblings = ", ".join(LocalStorage(directory.parent).manifests()) or "none"
        raise FileNotFoundError(
            f"{directory} holds no complete checkpoint ({MANIFEST} is missing): {reason_for_absence(directory)}; complete ones beside it: "
            f"{siblings}"
        )
    manifest = check_manifest(directory, read_json(inside(directory, MANIFEST)))
    for name, record in manifest["files"].items():
        size = _size(inside(directory, name))
        if size is None:
            raise DamagedCheckpoint(f"{directory}: {name} is missing")
        if size != record["bytes"]:
            raise DamagedCheckpoint(
                f"{directory}: {name} has {size} bytes, and had {record['bytes']} when it was written"
            )
    return manifest


def reason_for_absence(directory: Path) -> str:
    """Explain why there is no checkpoint at ``directory``, and what to do: the path is wrong, a copy is incomplete, or another library has written
    it."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return _where_a_path_ends(directory)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {terminal_text(error)}"
    if not names:
        return "it is an empty folder"
    if any(next(directory.glob(pattern), None) for pattern in ("rank=*", *(f"{folder}/rank=*" for folder in FOLDERS))):
        return f"its other files are there, so a copy or a save, which writes {MANIFEST} last, was cut off: copy it again, or give another one"
    for sentence in filter(None, (advice(PLACE, name) for name in names)):
        return sentence
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return terminal_text(f"it has {', '.join(names[:_SHOWN])}{more}")


def _where_a_path_ends(directory: Path) -> str:
    """Name the first folder of a path at which nothing is, or a file or a link that is in the way."""
    if directory.is_symlink():
        return f"it is a link to {terminal_text(os.readlink(directory))}, which does not exist"
    first = directory
    while not first.parent.exists():
        first = first.parent
    if first.parent.is_file():
        return f"{terminal_text(first.parent)} is a file"
    return f"{terminal_text(first)} does not exist; if it was moved or renamed, give its new path"


def _size(path: Path | str) -> int | None:
    """The size of a regular file; ``None`` if there is no regular file at ``path``."""
    try:
        status = os.stat(path)
    except ValueError:  # not a possible file name
        return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _hidden_sibling(path: Path, kind: str) -> Path:
    """The hidden directory beside a checkpoint for ``kind``, a suffix in :data:`_REMAINS` without its dot."""
    return path.with_name(f".{path.name}.{kind}")


def _exists(path: str) -> bool:
    """Check that something exists at ``path``; a parent folder without permission is an error."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def _is_checkpoint(path: Path) -> bool:
    """Check for a checkpoint at ``path``, usable or not: its manifest exists, or all of its folders do."""
    try:
        if not os.path.lexists(path):
            return False
        return os.path.lexists(path / MANIFEST) or all((path / folder).is_dir() for folder in FOLDERS)
    except OSError:  # no permission for the parent folder, or the name is too long
        return os.path.lexists(path)


def _is_being_read(path: Path) -> bool:
    """Whether a reader holds a lock on the checkpoint at ``path``."""
    if not (path / MANIFEST).is_file():
        return False
    lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is not None:
        os.close(lock)
    return lock is None


def _delete(path: Path) -> None:
    """Delete a directory as far as possible; of a link, delete only the link."""
    if os.path.islink(path):
        path.unlink()
        return
    try:  # a joined checkpoint without its manifest has a single file: faster than a walk
        os.unlink(f"{path}/{JOINED}")
        os.rmdir(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path, mode: int) -> int | None:
    """Lock a checkpoint and return the descriptor that holds the lock until it is closed; ``None``: another process holds the lock."""
    descriptor = open_file(directory / MANIFEST)
    if _flock(descriptor, mode):
        return descriptor
    os.close(descriptor)
    return None


def _flock(descriptor: int, mode: int) -> bool:
    """Try to lock a file. Also True where the file system has no locks: readers and drafts are not protected there."""
    try:
        fcntl.flock(descriptor, mode)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Opened:
    """A checkpoint that is open for reading, and cannot be removed until :meth:`close`. A context manager.

    Args:
        directory: the checkpoint's path.
        share: ``(index, number of readers)``: this reader verifies only its share of the checksums.
        folders: the folders whose checksums are verified.

    Raises:
        DamagedCheckpoint, FileNotFoundError: the errors of :func:`read_manifest`, or a checksum is wrong.
    """

    def __init__(self, directory: Path, share: tuple[int, int] = (0, 1), folders: Iterable[str] = FOLDERS) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        """The manifest: the facts, and ``format``, ``saved_at`` (seconds since 1970), ``world_size`` and ``files``."""
        self._lock = _lock(directory, fcntl.LOCK_SH)
        chosen = [name for name in sorted(self.files) if name.split("/")[0] in (*folders, name)]
        try:
            verify(directory, self.files, blocks(self.files, chosen)[share[0] :: share[1]])
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> dict[str, Record]:
        records: dict[str, Record] = self.manifest["files"]
        return records

    def tensors(self, folder: str) -> TensorFiles:
        """The tensors of ``model`` or ``optim``."""
        if self.manifest.trees:
            return self._joined(folder)
        names = {f"{folder}/{path.name}" for path in (self.directory / folder).glob("*.safetensors")}
        if unlisted := sorted(names - self.files.keys()):
            raise DamagedCheckpoint(f"{self.directory}: {unlisted[0]} is not in the manifest")
        return TensorFiles(self.directory / folder, [self.directory / name for name in sorted(names)])

    def tree(self, stem: str, tensors: Mapping[str, Any] | None = None) -> Any:
        """Read a tree of the checkpoint, such as :data:`SHARED`; ``None``: the checkpoint has no tree of this name.

        Args:
            tensors: values for the tree's tensors; by default the tensors are read to the CPU.
        """
        location, name = f"{stem}.json", f"{stem}.safetensors"
        if trees := self.manifest.trees:
            if stem not in trees:
                return None
            location, value = f"{MANIFEST}, {stem}", trees[stem]
            if tensors is None:
                tensors = self._joined(stem).whole_tensors()
        elif location not in self.files:
            return None
        else:
            if tensors is None:
                tensors = read_tensors(inside(self.directory, name)) if name in self.files else {}
            value = read_json(inside(self.directory, location))
        try:
            return unpack(value, tensors)
        except ValueError as error:
            raise DamagedCheckpoint(f"{self.directory}: {location}: {error}") from error

    def _joined(self, name: str) -> TensorFiles:
        """The tensors of a folder or a tree of a joined checkpoint."""
        return TensorFiles(self.directory, [inside(self.directory, file) for file in self.files], f"{name}/")

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
