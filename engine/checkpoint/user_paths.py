"""Checkpoints and other files, from a user's path or URL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.checkpoint.files import DamagedCheckpoint, inside
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import FOLDERS, MANIFEST
from engine.checkpoint.one_file import is_one_file
from engine.checkpoint.remote_storage import reach, without_query
from engine.checkpoint.runs import FIRST, run_root_of
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import split_path, storage_of


def folder(path: str | Path) -> Storage | None:
    """The folder of checkpoints at a path or a URL: itself, or its ``checkpoints/``, of the newest run that has any. ``version_0`` names the
    first run of a ``root_dir``, which has no folder of this name.

    ``None``: there are none, or it is a checkpoint itself.

    Raises:
        NotADirectoryError: it is a file.
    """
    if is_one_file(path):
        return None
    if "://" not in str(path) and Path(path).is_file():
        raise NotADirectoryError(
            f"{path} is a file, but a checkpoint is a directory. Convert a file of another trainer with: fit checkpoint convert {path} OUT"
        )
    where, name = split_path(path)
    if where.has(name):
        return None
    root = str(path).rstrip("/")
    folders = run_root_of(root).folders()
    above, _, name = root.rpartition("/")
    if name == FIRST:
        folders.append(above or ".")

    tried: list[Storage] = []
    for each in folders:
        if not _has_folders(each):  # of 100,000 runs, most may have saved nothing
            continue
        for place in (storage_of(each), storage_of(f"{each}/checkpoints")):
            if any(place.complete()):
                return place
            tried.append(place)
    return next((place for place in tried if place.incomplete(())), None)


def _has_folders(path: str) -> bool:
    """Whether a folder may have checkpoints, or a folder with some; of a URL this is not known."""
    if "://" in path:
        return True
    try:
        with os.scandir(path) as inner:
            return any(entry.is_dir() for entry in inner)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def find(path: str | Path) -> tuple[Storage, list[str]]:
    """The checkpoints at a path or a URL: itself, or the complete ones in a :func:`folder`, oldest first.

    Raises:
        FileNotFoundError: there are none, or the named one does not exist.
        NotADirectoryError: it is a file.
        DamagedCheckpoint: there are only incomplete ones; the message has the reason.
    """
    return find_in(path, folder(path))


def find_in(path: str | Path, inner: Storage | None) -> tuple[Storage, list[str]]:
    """Do what :func:`find` does, for a caller that has called :func:`folder` already: ``inner`` is its result."""
    if inner is not None and (names := list(inner.manifests())):
        return inner, names
    where, name = split_path(path)
    if inner is None and where.has(name):
        return where, [name]
    damaged = {str(inner.path(n)): it.reason for n, it in inner.incomplete().items()} if inner is not None else {}
    damaged |= {str(where.path(n)): it.reason for n, it in where.incomplete().items() if n == name}
    for what, why in damaged.items():
        raise DamagedCheckpoint(f"{what}: {why}; there is no complete checkpoint")
    beside = ", ".join(where.manifests()) or "none"
    raise FileNotFoundError(
        f"{path} is not a checkpoint, and contains none ({MANIFEST} is missing); complete ones beside it: {beside}"
    )


@contextmanager
def opened(path: str | Path, folders: Iterable[str] = FOLDERS) -> Iterator[Opened]:
    """The checkpoint at ``path``, or the newest one in it (see :func:`find`), for one process.

    Args:
        folders: those whose checksums are checked.

    Raises:
        DamagedCheckpoint, FileNotFoundError: as :func:`find` and :class:`Opened`.
    """
    where, names = find(path)
    with Opened(where.fetch(names[-1]), folders=folders) as found:
        yield found


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """The file or directory at ``path`` as a local one: itself, or a copy of a URL's content, while the context lasts.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: fsspec does not know the protocol.
    """
    if "://" not in str(path):
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist")
        yield Path(path)
        return
    files, inner = reach(str(path))
    if not files.exists(inner):
        raise FileNotFoundError(f"{without_query(path)} does not exist")
    with tempfile.TemporaryDirectory(prefix="copy-") as folder:
        target = Path(folder) / without_query(path).rstrip("/").rpartition("/")[2]
        for file in files.find(inner):
            to = target if file == inner else inside(target, file.removeprefix(inner.rstrip("/")).lstrip("/"))
            to.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(file, str(to))
        yield target


@contextmanager
def outgoing(path: str | Path) -> Iterator[Path]:
    """A local directory for files to be written to ``path``: itself, or one whose files are sent to a URL at the context's end."""
    if "://" not in str(path):
        yield Path(path)
        return
    files, inner = reach(str(path))
    if files.exists(inner) and files.find(inner):
        raise FileExistsError(f"{path} is not empty: choose another path")
    with tempfile.TemporaryDirectory(prefix="outgoing-") as folder:
        yield Path(folder)
        files.makedirs(inner)
        for file in sorted(Path(folder).iterdir()):
            files.put_file(str(file), f"{inner.rstrip('/')}/{file.name}")
