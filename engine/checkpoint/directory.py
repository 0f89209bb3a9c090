"""One checkpoint is one directory. It appears complete or not at all, and nothing in it is code.

::

    step=00000120/
        manifest.json                   format, time, world size, counters, metrics; size and checksum of every other file, and its own
        model/rank=00000.safetensors    what this rank wrote of the parameters and buffers
        model/model.json                names that share a tensor; state of modules that is not a tensor
        optim/rank=00000.safetensors    of the optimizers' states
        optim/optim.json                their structure
        weights/                        only with averaged weights: see engine/checkpoint/other_weights.py
        state/shared.json               [+ .safetensors] the same on all ranks: schedulers, scaler, callbacks, counters
        state/rank=00001.json           [+ .safetensors] of each rank: random generators, position in streams

A small checkpoint that one rank writes is joined, since each file, folder and sync costs more than its content (:data:`JOINED_BYTES`,
:data:`JOINED_TREES`)::

    step=00000120/
        manifest.json                   as above; "$trees" has what stands above in JSON files, by their names without ".json"
        rank=00000.safetensors          all tensors, such as "model/<name>", "optim/<name>", "state/shared/<name>"

It is written into the hidden sibling ``.step=00000120.partial``, synced to the disk, given its manifest, and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.files import (
    DamagedCheckpoint,
    Record,
    blocks,
    inside,
    open_file,
    read_json,
    sync,
    verify,
    write_json,
)
from engine.checkpoint.json_tree import unpack
from engine.checkpoint.manifest import FOLDERS, JOINED, MANIFEST, TREES, WEIGHTS, Manifest, age_of, check_manifest
from engine.checkpoint.tensors import TensorFiles, read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARED, RANK = "state/shared", "state/rank={:05d}"
JOINED_BYTES = 4 << 20
"""Bytes of tensors up to which a checkpoint of one rank is joined: from here on the joined form would save less than a tenth."""
JOINED_TREES = 1 << 16
"""Bytes of JSON up to which it is: whoever lists checkpoints reads all of their manifests."""


# -- writing --------------------------------------------------------------------------------------------------------------------------


def draft(directory: Path) -> Path:
    """The hidden draft of the checkpoint ``directory``."""
    return directory.with_name(f".{directory.name}.partial")


def begin(directory: Path, new: bool = True, folders: Sequence[str] = FOLDERS) -> int:
    """Make an empty draft; on one rank.

    Args:
        folders: those in it.
        new: the folder of ``directory`` may be new, and is not on the disk yet.

    Returns:
        A descriptor that protects the draft from :func:`sweep` of other jobs until it is closed (or its process ends).

    Raises:
        FileExistsError: ``directory`` exists, is not a checkpoint and not empty.
    """
    used = os.path.exists(directory) and _size(f"{directory}/{MANIFEST}") is None
    if used and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} exists and is not a checkpoint ({MANIFEST} is missing): choose another path, or move it away"
        )
    partial = draft(directory)
    if os.path.lexists(partial):
        _delete(partial)
    descriptor = None
    try:
        partial.mkdir(parents=True)
        descriptor = os.open(partial, os.O_RDONLY)
        _flock(descriptor, fcntl.LOCK_EX)
        for folder in folders:
            os.mkdir(f"{partial}/{folder}")
        if new:
            sync(directory.parent.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)
        raise
    return descriptor


def write_tree(folder: Path, stem: str, tree: tuple[Any, Mapping[str, Tensor]]) -> dict[str, Record]:
    """Write ``<stem>.json`` and, when there are tensors, ``<stem>.safetensors``; ``tree`` is a result of :func:`pack`."""
    value, tensors = tree
    files = {f"{stem}.json": write_json(folder / f"{stem}.json", value)}
    if tensors:
        files[f"{stem}.safetensors"] = write_tensors(folder / f"{stem}.safetensors", tensors)
    return files


def seal(directory: Path, manifest: Mapping[str, Any], files: Mapping[str, Record]) -> Record:
    """Add the manifest to a draft and rename it to ``directory``; on one rank, when all have written.

    Args:
        files: all files of the draft.

    Returns:
        The record of the manifest.

    Raises:
        FileNotFoundError: a file is not in the draft: some rank writes to another file system.
    """
    partial = draft(directory)
    for name, known in files.items():
        if _size(f"{partial}/{name}") != known["bytes"]:
            raise FileNotFoundError(
                f"{name} was written by its rank and is not in {partial}: all ranks need the same file system there"
            )
    record = write_json(partial / MANIFEST, manifest)
    folders = () if TREES in manifest else (*FOLDERS, WEIGHTS)
    for folder in (*folders, "."):
        if folder != WEIGHTS or (partial / folder).is_dir():
            sync(f"{partial}/{folder}")
    old = directory.with_name(f".{directory.name}.replaced")
    if _size(f"{directory}/{MANIFEST}") is not None:
        _delete(old)
        directory.rename(old)
    try:
        partial.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    sync(directory.parent)
    if os.path.lexists(old):
        _delete(old)
    return record


# -- reading --------------------------------------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint whose files all exist with the right sizes; their content is not checked.

    Raises:
        DamagedCheckpoint: it is incomplete, changed since it was written, or of an unknown form.
        FileNotFoundError: there is no checkpoint at ``directory``; the error lists those in the same folder.
    """
    if _size(f"{directory}/{MANIFEST}") is None:
        beside = ", ".join(each.name for each in list_checkpoints(directory.parent)) or "none"
        raise FileNotFoundError(
            f"{directory} holds no complete checkpoint ({MANIFEST} is missing); complete ones beside it: {beside}"
        )
    manifest = check_manifest(directory, read_json(inside(directory, MANIFEST)))
    for name, known in manifest["files"].items():
        size = _size(inside(directory, name))
        if size is None:
            raise DamagedCheckpoint(f"{directory}: {name} is missing")
        if size != known["bytes"]:
            raise DamagedCheckpoint(
                f"{directory}: {name} has {size} bytes, and had {known['bytes']} when it was written"
            )
    return manifest


def _size(path: Path | str) -> int | None:
    """The size of a regular file; ``None``: there is none."""
    try:
        status = os.stat(path)
    except ValueError:  # no name of a file
        return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class Opened:
    """A checkpoint opened for reading; it is not removed until :meth:`close`. A context manager.

    Args:
        directory: its path.
        share: this reader checks only its share of the files' checksums: ``(index, number of readers)``.
        folders: those whose checksums are checked.

    Raises:
        DamagedCheckpoint, FileNotFoundError: as :func:`read_manifest`, and if a checksum is wrong.
    """

    def __init__(self, directory: Path, share: tuple[int, int] = (0, 1), folders: Iterable[str] = FOLDERS) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        """As given to :func:`seal`, and ``format``, ``saved_at`` (seconds since 1970), ``world_size`` and ``files``."""
        self._lock = _lock(directory, fcntl.LOCK_SH)
        chosen = [name for name in sorted(self.files) if name.split("/")[0] in (*folders, name)]
        try:
            verify(directory, self.files, blocks(self.files, chosen)[share[0] :: share[1]])
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> dict[str, Record]:
        found: dict[str, Record] = self.manifest["files"]
        return found

    def tensors(self, folder: str) -> TensorFiles:
        """The tensors of ``model`` or ``optim``."""
        if self.manifest.trees:
            return self._joined(folder)
        there = {f"{folder}/{path.name}" for path in (self.directory / folder).glob("*.safetensors")}
        if strange := sorted(there - self.files.keys()):
            raise DamagedCheckpoint(f"{self.directory}: {strange[0]} is not in the manifest")
        return TensorFiles(self.directory / folder, [self.directory / name for name in sorted(there)])

    def tree(self, stem: str, tensors: Mapping[str, Any] | None = None) -> Any:
        """A tree of the checkpoint, such as :data:`SHARED`; ``None``: it has none of this name.

        Args:
            tensors: replacements for its tensors; by default they are read to the CPU.
        """
        where, name = f"{stem}.json", f"{stem}.safetensors"
        if trees := self.manifest.trees:
            if stem not in trees:
                return None
            where, value = f"{MANIFEST}, {stem}", trees[stem]
            if tensors is None:
                tensors = self._joined(stem).whole()
        elif where not in self.files:
            return None
        else:
            if tensors is None:
                tensors = read_tensors(inside(self.directory, name)) if name in self.files else {}
            value = read_json(inside(self.directory, where))
        try:
            return unpack(value, tensors)
        except ValueError as error:
            raise DamagedCheckpoint(f"{self.directory}: {where}: {error}") from error

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


# -- keeping ---------------------------------------------------------------------------------------------------------------------------


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints directly in ``root``, in the order in which they were written, oldest first; see :func:`read_manifests`."""
    return list(read_manifests(root))


def read_manifests(root: Path) -> dict[Path, dict[str, Any]]:
    """The manifests of the complete checkpoints directly in ``root``, in the order in which they were written, oldest first.

    Complete: a manifest that is as it was written, and every file there with its right size. After a run that went back to an earlier
    step, the newest is the last that this run wrote, not the one with the highest step.
    """
    found = [(age_of(manifest), path.name, path, manifest) for path, manifest in complete(root)]
    return {path: manifest for _, _, path, manifest in sorted(found, key=lambda entry: entry[:2])}


def is_as_written(path: Path, files: Mapping[str, Record], manifest: Record) -> bool:
    """Check that a checkpoint of this process is still at ``path``, with these records of its files and of its manifest."""
    try:
        verify(path, {MANIFEST: manifest}, [(MANIFEST, 0)])
        return all(_size(f"{path}/{name}") == known["bytes"] for name, known in files.items())
    except (DamagedCheckpoint, OSError):
        return False


def complete(root: Path, without: str = "") -> Iterator[tuple[Path, dict[str, Any]]]:
    """The complete checkpoints directly in ``root``, except for ``without``, with their manifests, each read when it is asked for."""
    with os.scandir(root) if root.is_dir() else nullcontext(()) as entries:
        for entry in entries:
            name = entry.name
            # An old one that was moved aside stands in while its successor is not yet there.
            stands_in = name.startswith(".") and name.endswith(".replaced")
            if name == without or (stands_in and os.path.exists(f"{root}/{name[1:].removesuffix('.replaced')}")):
                continue
            if (stands_in or not name.startswith(".")) and os.path.isfile(f"{root}/{name}/{MANIFEST}"):
                with suppress(DamagedCheckpoint, OSError):
                    yield root / name, read_manifest(root / name)


def new_serials(root: Path, known: set[tuple[str, int, int]]) -> list[int]:
    """The serial numbers of the checkpoints in ``root`` that are not in ``known``, to which they are added.

    Args:
        known: names, with inodes and times: a checkpoint that replaces one of its name is new.
    """
    serials: list[int] = []
    with os.scandir(root) as entries:
        for entry in entries:
            with suppress(DamagedCheckpoint, OSError):
                status = entry.stat()
                key = identity(entry.name, status)
                if key not in known and not entry.name.startswith("."):
                    known.add(key)
                    manifest = check_manifest(entry.path, read_json(inside(root / entry.name, MANIFEST)))
                    serials.append(manifest["serial"])
    return serials


def identity(name: str, status: os.stat_result) -> tuple[str, int, int]:
    """Return a key that differs between checkpoints of the same name."""
    return name, status.st_ino, status.st_mtime_ns


def remove(path: Path, another: bool = False) -> bool:
    """Delete a checkpoint: it is hidden, then its manifest goes, then the rest; a kill in between leaves nothing that looks like one.

    Of a link to one only the link goes.

    Args:
        another: there is another complete one beside it: the folder is not searched for one.

    Returns:
        False: it stays, because someone is reading it, or because no other complete one lies beside it.

    Raises:
        ValueError: ``path`` exists, but is not a checkpoint.
        OSError: not everything could be deleted; a later call deletes the rest.
    """
    removed = path.with_name(f".{path.name}.removed")
    if os.path.exists(path):
        if _size(f"{path}/{MANIFEST}") is None:
            raise ValueError(f"{path} is not a checkpoint ({MANIFEST} is missing): it is not deleted")
        if not another and not any(complete(path.parent, path.name)):
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
        _delete(removed)  # another job's sweep may be deleting it
        if os.path.lexists(removed):
            raise OSError(errno.ENOTEMPTY, "not all of its files could be deleted", str(removed))
    return True


def is_read(path: Path) -> bool:
    """Whether someone is reading this checkpoint now."""
    if not (path / MANIFEST).is_file():
        return False
    lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is not None:
        os.close(lock)
    return lock is None


def is_one(path: Path) -> bool:
    """Whether there is a checkpoint, usable or not: the manifest or all of its folders exist."""
    try:
        if not os.path.lexists(path):
            return False
        return os.path.lexists(path / MANIFEST) or all((path / folder).is_dir() for folder in FOLDERS)
    except OSError:  # no permission for the folder above, or too long a name
        return os.path.lexists(path)


def is_readable(path: Path) -> bool:
    """Whether this version reads the manifest of the checkpoint at ``path``, and all files exist."""
    try:
        if not (path / MANIFEST).is_file():
            return False  # here already: the error of read_manifest lists all others
        read_manifest(path)
    except (DamagedCheckpoint, OSError):
        return False
    return True


def sweep(root: Path) -> None:
    """Delete what killed runs left in ``root``; drafts of other running jobs stay."""
    whole = set(list_checkpoints(root))
    for path in directories(root):
        ours = path.name.startswith(".") and path.suffix in (".partial", ".replaced", ".removed") and path not in whole
        with suppress(OSError):
            if ours and all(each.name in (*FOLDERS, WEIGHTS, JOINED, MANIFEST) for each in path.iterdir()):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    if _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)


def directories(root: Path) -> list[Path]:
    """The entries of ``root``, which may not exist."""
    return (
        [root / name for name in sorted(os.listdir(root)) if os.path.isdir(f"{root}/{name}")] if root.is_dir() else []
    )


def _delete(path: Path) -> None:
    """Delete a directory as far as possible; of a link only the link."""
    if os.path.islink(path):
        path.unlink()
        return
    try:  # a joined one, without its manifest: a walk through it would take longer
        os.unlink(f"{path}/{JOINED}")
        os.rmdir(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path, mode: int) -> int | None:
    """A descriptor that holds the lock of a checkpoint until it is closed; ``None``: another process holds it."""
    descriptor = open_file(directory / MANIFEST)
    if _flock(descriptor, mode):
        return descriptor
    os.close(descriptor)
    return None


def _flock(descriptor: int, mode: int) -> bool:
    """Whether the lock was acquired, or the file system has none: readers and drafts are not protected there."""
    try:
        fcntl.flock(descriptor, mode)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
